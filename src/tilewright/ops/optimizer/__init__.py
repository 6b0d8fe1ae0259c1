"""One launch for a whole optimizer step."""
