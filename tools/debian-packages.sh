#!/bin/sh
# Debian packages that the build and the tests need. Installs the missing ones as root, names them otherwise; never fails a build
# by itself: each missing one is noticed, with a clear message, by what needs it.
set -eu

# compiler and headers: pillow-simd and the native reader; jpegtran (libjpeg-turbo-progs): lossless transcoding; fonts: contact
# sheets; strace: the fault tests.
WANTED="gcc libc6-dev python3-dev python3-venv libjpeg-dev zlib1g-dev libwebp-dev libtiff-dev libfreetype-dev liblcms2-dev
        libjpeg-turbo-progs fonts-dejavu-core strace"

if ! command -v dpkg-query >/dev/null; then
    echo "note: not a Debian system; these are used where they exist: $(echo $WANTED)"
    exit 0
fi

missing=""
for package in $WANTED; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # An old package list may still do where the update fails.
    apt-get update -qq || true
    apt-get install -y -qq --no-install-recommends $missing </dev/null && exit 0
    echo "warning: apt-get could not install:$missing"
else
    echo "note: missing Debian packages; to install them: sudo apt-get install$missing"
fi
