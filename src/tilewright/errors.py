"""The one exception that a command shows as a sentence instead of a traceback."""


class UserError(ValueError):
    """Something the user can put right; the message says what is wrong and what to do."""
