"""The search: a space of settings, a trial for each, a study of them all, a table."""
