"""Two members, or a caller and the coordinator, prove to each other that they have one secret, in three messages.

The caller speaks first, then the callee, then the caller. Each message carries a tag over all that was said so far, and the
first of each end a new random number. So no message can be altered, used again, or put into another conversation. The
secret itself never travels. What follows on the connection has keys of its own; with encryption from a key exchange (X25519),
so that people who learn the secret later cannot read what they have recorded.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..errors import LinkError
from .cipher import AesGcm, Cipher, Tagged, check_encryption, cryptography
from .secret import Keys

_NONCE_BYTES = 32
_FIRST_OF_EACH = 2
_COMPLETE = 4
"""What the conversation is about, and three messages."""
_GIVE = ": give every region the same (regions.secret_file, HF_COCODC_SECRET)"


class Refused(LinkError):
    """The other end has not proven that it has the secret.

    Args:
        why: in words about {it}, the other end, and {here}, this one.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        super().__init__(self.naming("the other end", "this end"))

    def naming(self, it: str, here: str) -> str:
        """The reason, with these names of both ends: people at either end read it."""
        return self._why.format(it=it, here=here)


class Proof:
    """One end of a conversation. The ends `say` and `hear` in turns; the one that calls begins, and three messages complete it.

    Without a secret the messages stay as they are. Between members, what the conversation is about holds no epoch: their tickets
    stand for it. No two processes of a run have the same one, and a process that was lost is refused with its ticket.

    Args:
        keys: of the run's secret; None if this end has none.
        about: what the conversation is for; between members also the run and both of them. JSON-able, equal at both ends.
        encrypt: whether what follows is encrypted; equal at both ends.

    Raises:
        InputError: it cannot be encrypted here.
    """

    def __init__(self, keys: Keys | None, about: Mapping[str, Any], encrypt: bool = False) -> None:
        if encrypt:
            check_encryption(keys)
        self._keys, self._encrypts = keys, encrypt
        self._said = [_canonical(about)]
        self._calls = False
        self._shared = b""

    def say(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as it is to be sent."""
        said = dict(message)
        if self._keys is None:
            return said
        if len(self._said) <= _FIRST_OF_EACH:
            self._calls = len(self._said) == 1
            said["nonce"] = secrets.token_hex(_NONCE_BYTES)
            if self._encrypts:
                said["public"] = self._private.public_key().public_bytes_raw().hex()
        self._said.append(_canonical(said))
        return {**said, "proof": self._tag()}

    def hear(self, message: Mapping[str, Any]) -> None:
        """Check a message of the other end.

        Raises:
            Refused: it does not prove that the other end has the secret. The conversation is over.
        """
        proof = message.get("proof")
        if self._keys is None:
            if proof is not None:
                raise Refused(f"{{it}} has a secret, and {{here}} has none{_GIVE}")
            return
        if not isinstance(proof, str):
            raise Refused(f"{{it}} has no secret, and {{here}} has one{_GIVE}")
        is_first = len(self._said) <= _FIRST_OF_EACH
        if is_first and ("public" in message) != self._encrypts:
            raise Refused("of {it} and {here} only one has regions.encrypt: make it equal everywhere")
        try:
            self._said.append(_canonical({key: value for key, value in message.items() if key != "proof"}))
        except RecursionError:
            raise Refused("{it} says what no member says") from None
        if not hmac.compare_digest(proof.encode(errors="replace"), self._tag().encode()):
            # the first message can be put back; those that follow answer a number that was never used before
            is_asked = len(self._said) == 2
            raise Refused(
                f"{{it}} has another secret than {{here}}{_GIVE}"
                if is_asked
                else "{it} repeats an old message, or has another secret than {here}"
            )
        if is_first and self._encrypts:
            self._agree(message["public"])

    def ciphers(self, in_order: bool = True) -> tuple[Cipher, Cipher] | None:
        """What seals this end's messages, and what opens the other's, `in_order` or not. None without a secret."""
        session = self.session()
        if session is None:
            return None
        send, receive = map(session.of, ("caller", "callee") if self._calls else ("callee", "caller"))
        kind = AesGcm if self._encrypts else Tagged
        return kind(send, in_order), kind(receive, in_order)

    def session(self) -> Keys | None:
        """Keys that only the two ends of this conversation have, once it is complete. None without a secret."""
        if self._keys is None:
            return None
        assert len(self._said) == _COMPLETE, "the members have not proven themselves yet"
        return self._keys.of("session", hashlib.sha256(b"".join(self._said)).hexdigest(), self._shared.hex())

    @cached_property
    def _private(self) -> Any:
        return _x25519().X25519PrivateKey.generate()

    def _tag(self) -> str:
        assert self._keys is not None
        return self._keys.of("proof").tag(*self._said).hex()

    def _agree(self, public: Any) -> None:
        try:
            self._shared = self._private.exchange(
                _x25519().X25519PublicKey.from_public_bytes(bytes.fromhex(public))
            )
        except (TypeError, ValueError):
            raise Refused("{it} gives no public key") from None


def _canonical(message: Mapping[str, Any]) -> bytes:
    """The message in the one form that both ends see."""
    return json.dumps(json.loads(json.dumps(message)), sort_keys=True).encode()


def _x25519() -> Any:
    return cryptography("hazmat.primitives.asymmetric.x25519")
