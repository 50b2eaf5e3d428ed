"""What a chat template is tried with: made-up calls, and placeholders for texts, names and arguments."""

from typing import Any, NamedTuple

Message = dict[str, Any]
Tools = list[Any] | None

PLACEHOLDER = "anyformerPLACEHOLDER"
# A made-up call; its id is one that templates take which want nine letters or digits.
CALL: dict[str, Any] = {"id": "anyformer", "type": "function", "function": {"name": "f", "arguments": {}}}


class Failed(Exception):
    """A template refuses a conversation, or breaks on it."""


class Call(NamedTuple):
    """What a template writes around the calls of a message.

    Attributes:
        leads: what may stand between the header and the first text of the message, the longest first.
        tail: behind the last arguments, the end token included.
        end: that token.
    """

    leads: tuple[str, ...]
    tail: str
    end: str


class Names(NamedTuple):
    """Placeholders for the calls of one message."""

    turn: str
    mark: str

    def function(self, number: int) -> str:
        return f"{self.mark}{self.turn}n{number}x"

    def key(self, number: int) -> str:
        return f"{self.mark}{self.turn}k{number}x"

    def value(self, number: int) -> str:
        return f"{self.mark}{self.turn}v{number}x"

    def masked(self, call: Message, number: int) -> Message:
        """A call with its name and arguments masked."""
        function = {"name": self.function(number), "arguments": {self.key(number): self.value(number)}}
        return call | {"type": "function", "function": function}

    def all_in(self, text: str, calls: int) -> bool:
        names = (name(number) for number in range(calls) for name in (self.function, self.key, self.value))
        return all(name in text for name in names)
