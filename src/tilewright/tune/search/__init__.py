"""What to try next: the space of levers, predictions of its points, which of them are best, and the time for them."""
