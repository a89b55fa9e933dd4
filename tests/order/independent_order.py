"""The order of docs/order.md a second time, in plain Python and one element at a time; nothing of lfdata is imported."""

import hashlib
import itertools
import math
from fractions import Fraction

M = (1 << 64) - 1
G = 0x9E3779B97F4A7C15


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M
    return x ^ x >> 31


def key(*parts):
    k = 0
    for p in parts:
        k = mix((k + G & M) ^ mix(p + G & M))
    return k


def permuted(n, k, x):
    a = next(c for c in range(math.isqrt(n), n + 2) if c * c >= n)
    b = -(-n // a)
    while True:
        left, right = divmod(x, b)
        for i in range(10):
            k_i = mix(k + (i + 1) * G & M)
            if i % 2 == 0:
                left = (left + mix(right ^ k_i) % a) % a
            else:
                right = (right + mix(left ^ k_i) % b) % b
        x = left * b + right
        if x < n:
            return x


def epoch_of(n, seed, epoch, mode, block=1024, window=16):
    """All samples of an epoch."""
    if mode == "sequential":
        return list(range(n))
    if mode == "full":
        return [permuted(n, key(seed, epoch, 0), p) for p in range(n)]
    blocks = [list(range(start, min(start + block, n))) for start in range(0, n, block)]
    blocks = [blocks[permuted(len(blocks), key(seed, epoch, 1), p)] for p in range(len(blocks))]
    found = []
    for w, start in enumerate(range(0, len(blocks), window)):
        together = [sample for samples in blocks[start : start + window] for sample in samples]
        found += [together[permuted(len(together), key(seed, epoch, 2, w), p)] for p in range(len(together))]
    return found


def draws(seed, epoch, index, occurrence, operation, count):
    number = int.from_bytes(hashlib.sha256(operation.encode()).digest()[:8], "little")
    k = key(seed, 3, number, epoch, index, occurrence)
    return [(mix(k + (j + 1) * G & M) >> 11) / 2**53 for j in range(count)]


def selection_digest(mask):
    bits = [0] * -(-len(mask) // 8)
    for i, chosen in enumerate(mask):
        bits[i // 8] |= int(chosen) << i % 8
    return hashlib.sha256(len(mask).to_bytes(8, "little") + bytes(bits)).hexdigest()


def joined(parts, block):
    """The nodes of a mixture: (weight, number, source or the two that were joined)."""
    nodes = [(part, source, source) for source, part in enumerate(parts)]
    for number in range(len(parts), 2 * len(parts)):
        light, heavy, *_ = [*sorted(nodes, key=lambda node: node[:2]), None]
        if light[0] * block >= sum(parts):
            break
        nodes = [node for node in nodes if node not in (light, heavy)] + [(light[0] + heavy[0], number, (light, heavy))]
    return sorted(nodes, key=lambda node: node[1])


def divided(node, count, found):
    if isinstance(node[2], int):
        found[node[2]] = count
        return
    light, heavy = node[2]
    share = math.floor(Fraction(count * light[0], node[0]) + Fraction(1, 2))
    divided(light, share, found)
    divided(heavy, count - share, found)


def stream(parts, block, seed, segment=0):
    """The sources of a segment, position after position, without end."""
    nodes, before = joined(parts, block), [0] * len(parts)
    for k in itertools.count():
        after = [0] * len(parts)
        bounds = [(k + 1) * block * sum(n[0] for n in nodes[:j]) // sum(parts) for j in range(len(nodes) + 1)]
        for node, start, stop in zip(nodes, bounds[:-1], bounds[1:], strict=True):
            divided(node, stop - start, after)
        laid = [source for source in range(len(parts)) for _ in range(after[source] - before[source])]
        yield from (laid[permuted(block, key(seed, segment, 4, k), p)] for p in range(block))
        before = after


def mixture(sizes, parts, block, exhaustion, seed, epoch, n=None):
    """(source, epoch of the source, place in that epoch) of every position of an epoch."""
    used, found, live, segment = [0] * len(sizes), [], list(range(len(sizes))), 0
    sources = stream(parts, block, seed)
    if exhaustion == "repeat":
        while n is None or len(found) < n * (epoch + 1):
            source = next(sources)
            found.append((source, used[source] // sizes[source], used[source] % sizes[source]))
            used[source] += 1
            if n is None and all(count >= size for count, size in zip(used, sizes, strict=True)):
                n = len(found)
        return found[epoch * n : (epoch + 1) * n]
    while live:
        source = live[next(sources)]
        if used[source] == sizes[source]:
            break
        found.append((source, epoch, used[source]))
        used[source] += 1
        if exhaustion == "drop" and used[source] == sizes[source]:
            live.remove(source)
            segment += 1
            sources = stream([parts[source] for source in live], block, seed, segment)
    return found[:n]


def buckets(lengths, seed, epoch, window, group):
    """Places in the order below, position after position."""
    found = []
    for w, start in enumerate(range(0, len(lengths), window)):
        places = list(range(start, min(start + window, len(lengths))))
        whole = len(places) // group * group
        together, rest = (sorted(part, key=lambda p: (lengths[p], p)) for part in (places[:whole], places[whole:]))
        groups = [together[at : at + group] for at in range(0, whole, group)]
        for p in range(len(groups)):
            found += groups[permuted(len(groups), key(seed, epoch, 5, w), p)]
        found += rest
    return found


def packing(lengths, seed, epoch, window, capacity, too_long, most=None):
    """Rows of (place in the order below, first token, tokens)."""
    found = []
    for w, start in enumerate(range(0, len(lengths), window)):
        items = []
        for p in range(start, min(start + window, len(lengths))):
            if too_long == "split":
                items += [(p, at, min(capacity, lengths[p] - at)) for at in range(0, max(1, lengths[p]), capacity)]
            elif too_long == "truncate" or lengths[p] <= capacity:
                items.append((p, 0, min(lengths[p], capacity)))
        rows = []
        for item in sorted(items, key=lambda item: -item[2]):
            free = [capacity - sum(i[2] for i in row) if most is None or len(row) < most else -1 for row in rows]
            fits = [(left, number) for number, left in enumerate(free) if left >= item[2]]
            if not fits:
                rows.append([])
            rows[min(fits)[1] if fits else -1].append(item)
        found += [sorted(rows[permuted(len(rows), key(seed, epoch, 6, w), p)]) for p in range(len(rows))]
    return found
