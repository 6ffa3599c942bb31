"""What processes that have died have left in a storage: signs of life, cards, calls, and what nobody has heard."""

from .mailbox import Mailbox


class Leftovers:
    """Removes what belongs to no process that has shown that it lives since the look before the last one.

    A process that lives and has no socket may be taken for dead: what it needs it writes again before it has one.
    """

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._lives: dict[str, bytes | None] = {}
        self._alive: set[str] | None = None

    def look(self) -> None:
        """Call this now and then; the first time, nothing is removed. Raises StorageError."""
        storage = self._box.storage
        folders = [(f"calls/{process}", process) for process in storage.names("calls")]
        for process in storage.names("said"):
            folders += [(f"said/{process}/{pair}", process) for pair in storage.names(f"said/{process}")]
        ends = [
            f"cards/{name}/{end}" for name in storage.names("cards") for end in storage.names(f"cards/{name}")
        ]
        cards = {end: self._box.card(end) for end in ends}
        # read last: a process shows that it lives before it writes anything else
        lives = {each: storage.get(f"lives/{each}") for each in storage.names("lives")}
        alive = {each for each, life in lives.items() if life != self._lives.get(each)} | {self._box.process}
        before, self._lives, self._alive = self._alive, lives, alive
        if before is None:
            return
        alive = alive | before
        for folder, process in folders:
            if process not in alive:
                self._box.empty(folder)
        dead = [end for end, card in cards.items() if card is not None and card.process not in alive]
        storage.remove(*dead, *(f"lives/{each}" for each in lives.keys() - alive))
