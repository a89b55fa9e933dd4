"""Which sample comes at which position: pure functions of (seed, epoch, position). See docs/order.md."""
