"""The identity that all who have a secret share: with it, each end of a connection proves that it has the secret (TLS 1.3).

It is a key, and a certificate which the key signs. Both follow from the secret, so every process makes the very same
certificate, and takes no other.
"""

import datetime
import functools
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .secret import Keys

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hf_cocodc")])
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(2999, 12, 31)
"""No machine's clock keeps anybody out."""


class Identity:
    """See `identity`.

    Attributes:
        certificate: in DER, equal in every process with the secret.
    """

    def __init__(self, keys: Keys) -> None:
        private = Ed25519PrivateKey.from_private_bytes(keys.of("identity").raw)
        certificate = (
            x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, _FROM, _UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(private, None)  # of the same certificate, Ed25519 makes the same signature
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        with (
            tempfile.NamedTemporaryFile() as file
        ):  # nobody else may read it; OpenSSL takes keys from files alone
            file.write(pem)
            file.flush()
            self._contexts = {is_server: self._context(is_server, file.name) for is_server in (False, True)}

    def _context(self, is_server: bool, file: str) -> ssl.SSLContext:
        # of all who may sign certificates it trusts only this one; a default context would trust those of the system, too
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses prove nothing
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        context.load_cert_chain(file)
        if is_server:
            context.num_tickets = 0  # nobody resumes a session
        return context

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, is_server: bool) -> ssl.SSLObject:
        """One end of a TLS 1.3 conversation, in which both ends prove themselves."""
        return self._contexts[is_server].wrap_bio(incoming, outgoing, server_side=is_server)


@functools.lru_cache(maxsize=64)
def identity(keys: Keys) -> Identity:
    """The identity that follows from the keys of a secret."""
    return Identity(keys)
