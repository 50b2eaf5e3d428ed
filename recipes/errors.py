"""The one exception for what a user can put right."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in a recipe, a file, a command or the environment that the user can mend.

    The message says what is wrong, where (file, line, key) and what would be right. The command line
    prints it without a traceback and exits with status 2.
    """


class Terminated(Exception):
    """A run was asked to stop, by SIGTERM, and has saved what is needed to go on; the exit status is 143."""


class Gathered:
    """Mistakes of steps that do not depend on each other, told at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step whose `UserError` does not end the ones after it.

        Behind such an error, whatever else a step stumbles over may be its consequence and is not told.
        """
        try:
            yield
        except UserError as error:
            if str(error) not in self.found:
                self.found.append(str(error))
        except Exception:
            if not self.found:
                raise

    def tell(self) -> None:
        """Raises:
        UserError: what was found, a line each.
        """
        if self.found:
            raise UserError("\n".join(self.found))
