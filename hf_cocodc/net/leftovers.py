"""What processes that have died have left in a storage: signs of life, cards, calls, and what nobody has heard."""

import time

from .mailbox import Mailbox

_KEPT_S = 3600.0


class Leftovers:
    """Removes what has not changed for an hour by the clock of this process, and belongs to no process that lives.

    A process that lives and has no socket may be taken for dead: what it needs it writes again before it has one.
    """

    def __init__(self, box: Mailbox) -> None:
        self._box, self._storage = box, box.storage
        self._seen: dict[str, tuple[object, float]] = {}
        self._before: dict[str, tuple[object, float]] = {}

    def look(self) -> None:
        """Call this now and then. Raises StorageError."""
        self._before, self._seen = self._seen, {}
        storage = self._storage
        lives = {each: storage.get(f"lives/{each}") for each in storage.names("lives")}
        alive = {each for each, life in lives.items() if not self._is_old(f"lives/{each}", life)}
        alive.add(self._box.process)
        for each in lives.keys() - alive:
            storage.remove(f"lives/{each}")
        for process in storage.names("calls"):
            if process not in alive and self._is_old(f"calls/{process}"):
                self._remove(f"calls/{process}")
        meets = set[str]()
        for name in storage.names("cards"):
            for end in storage.names(f"cards/{name}"):
                card = self._box.card(f"cards/{name}/{end}")
                is_used = card is None or card.process in alive
                if is_used or not self._is_old(f"cards/{name}/{end}", card):
                    meets.add(name)
                else:
                    storage.remove(f"cards/{name}/{end}")
        for name in storage.names("said"):
            if name not in meets and self._is_old(f"said/{name}"):
                for pair in storage.names(f"said/{name}"):
                    for end in storage.names(f"said/{name}/{pair}"):
                        self._remove(f"said/{name}/{pair}/{end}")

    def _is_old(self, name: str, content: object = None) -> bool:
        """Whether this has been found for an hour, and never another content."""
        now = time.monotonic()
        before, since = self._before.get(name, (content, now))
        self._seen[name] = content, since if before == content else now
        return now - self._seen[name][1] >= _KEPT_S

    def _remove(self, folder: str) -> None:
        for name in self._storage.names(folder):
            self._storage.remove(f"{folder}/{name}")
