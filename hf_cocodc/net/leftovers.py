"""What processes that have died have left in a storage: signs of life, cards, calls, and what nobody has heard."""

import contextlib

from .mailbox import Mailbox
from .storage import StorageError


class Leftovers:
    """Removes what belongs to no process that has shown that it lives since the look before the last one.

    A process that lives and has no socket may be taken for dead: what it needs it writes again before it has one.
    """

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._lives: dict[str, bytes | None] = {}
        self._alive: set[str] = set()
        self._there: set[str] = set()

    def look(self) -> None:
        """Call this now and then. What a first look finds, none removes before a third one."""
        with contextlib.suppress(StorageError):
            self._look()

    def _look(self) -> None:
        storage, owners = self._box.storage, dict[str, str]()
        for process in storage.names("calls"):
            owners[f"calls/{process}"] = process
        for process in storage.names("said"):
            owners |= {f"said/{process}/{pair}": process for pair in storage.names(f"said/{process}")}
        for name in storage.names("cards"):
            for end in storage.names(f"cards/{name}"):
                card = self._box.card(f"cards/{name}/{end}")
                owners |= {} if card is None else {f"cards/{name}/{end}": card.process}
        # read last: a process shows that it lives before it writes anything else
        lives = {each: storage.get(f"lives/{each}") for each in storage.names("lives")}
        owners |= {f"lives/{each}": each for each in lives}
        alive = {each for each, life in lives.items() if life != self._lives.get(each)} | {self._box.process}
        dead = [each for each in self._there & owners.keys() if owners[each] not in alive | self._alive]
        self._lives, self._alive, self._there = lives, alive, {*owners}
        for each in dead:
            if each.startswith(("calls/", "said/")):
                self._box.empty(each)
            else:
                storage.remove(each)
