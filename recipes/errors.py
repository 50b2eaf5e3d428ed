"""The one exception for what a user can put right."""


class UserError(Exception):
    """A mistake in a recipe, a file, a command or the environment that the user can mend.

    The message says what is wrong, where (file, line, key) and what would be right. The command line
    prints it without a traceback and exits with status 2.
    """
