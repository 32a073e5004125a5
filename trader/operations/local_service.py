"""The file by which commands find the services of a folder: their addresses, with a token that only they accept."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from trader.core.files import SMALL_BYTES_MAX, decode_json, read_regular, replace_file
from trader.core.ownership import EMBEDDED_FOLDER, why_not_own

_FOLDER: Final = EMBEDDED_FOLDER.parent

log = logging.getLogger(__name__)


class ServiceAddress(msgspec.Struct, frozen=True):
    """An address at which a service may respond, and the token that it accepts there, if it needs one."""

    url: str
    token: str | None = None
    is_of_folder: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


@contextmanager
def announced(port: int, service: ServiceAddress) -> Iterator[None]:
    """Keep the address of a service in the working folder, readable for its user alone, while it listens."""
    file = _FOLDER / f"service-{port}.json"
    try:
        _FOLDER.mkdir(exist_ok=True)
        replace_file(file, msgspec.json.encode(service), 0o600)
    except OSError as error:
        log.warning("%s cannot be written, so commands find this service by HOST and PORT: %s", file, error.strerror)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def announced_services() -> list[ServiceAddress]:
    """Return the services that announced themselves in the working folder; one that was killed no longer responds."""
    found = []
    for file in sorted(_FOLDER.glob("service-*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            if why_not_own(_FOLDER) is None and why_not_own(file) is None:
                found.append(decode_json(read_regular(file, SMALL_BYTES_MAX), ServiceAddress))
    return found
