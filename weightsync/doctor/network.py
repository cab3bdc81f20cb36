"""Names and ports: whether other hosts could find this one. A firewall cannot be seen from here."""

from __future__ import annotations

import socket

from weightsync.doctor.finding import Finding, Subject, ok, problem, warning

_NOWHERE = ("192.0.2.1", 9)
"""An address that is kept for documents (RFC 5737): nothing is sent there, a route is looked up."""


def host_name(subject: Subject) -> Finding:
    """Whether this host's own name leads to an address that others could use."""
    given = getattr(subject.scheme, "master_address", None)
    if given is not None:
        return _address(given)
    name = socket.gethostname()
    out = _outward()
    others = f"; connections go out by {out}" if out else ""
    remedy = (
        "Give master_address= an IP address of this host that the others reach"
        + (f", like {out}." if out else ".")
        + " It matters between hosts only."
    )
    try:
        found = {str(e[4][0]) for e in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        words = f"{name} is not found: {error.strerror or error}{others}"
        return warning("host name", words, remedy)
    addresses = ", ".join(sorted(found))
    if _is_here(found):
        words = f"{name} is {addresses}, which is this host alone{others}"
        return warning("host name", words, remedy)
    return ok("host name", f"{name} is {addresses}{others}")


def _address(name: str) -> Finding:
    """Whether the address that a scheme gives is known here."""
    try:
        found = {str(e[4][0]) for e in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        remedy = "Give master_address= an IP address of the trainer's host, or a name known here."
        return problem("address", f"{name} is not found: {error.strerror or error}", remedy)
    words = name if found == {name} else f"{name} is {', '.join(sorted(found))}"
    return ok("address", f"{words}{', this host alone' if _is_here(found) else ''}")


def _is_here(addresses: set[str]) -> bool:
    return all(address.startswith("127.") or address == "::1" for address in addresses)


def _outward() -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(_NOWHERE)
            return str(sock.getsockname()[0])
    except OSError:
        return None


def ports(subject: Subject) -> Finding:
    """Whether a port can be had, at the address that a scheme names or any."""
    scheme = subject.scheme
    if getattr(scheme, "url_scheme", "") == "nccl":
        return _port_of(scheme)
    host = _outward() or "127.0.0.1"
    try:
        with socket.socket() as sock:
            sock.bind((host, 0))
            sock.listen(1)
            port = sock.getsockname()[1]
            with socket.create_connection((host, port), timeout=2.0):
                pass
    except OSError as error:
        words = f"none can be had at {host}: {error.strerror or error}"
        return problem("ports", words, "See what the container or sandbox lets programs bind.")
    return ok("ports", f"free ones can be had at {host}; a firewall cannot be seen from here")


def _port_of(scheme: object) -> Finding:
    from weightsync.deadline import Deadline
    from weightsync.errors import DeadlineError, SenderBusyError, WeightSyncError
    from weightsync.schemes.nccl import NCCLScheme
    from weightsync.schemes.nccl.endpoint import Endpoint, connect, listen

    assert isinstance(scheme, NCCLScheme)
    where = Endpoint(scheme.master_address, scheme.port)
    try:
        connect(where, Deadline(1.0)).close()
        status = scheme.inspect()
        if status.sender_alive:
            return ok("ports", f"a sender answers at {where}")
        words = "; ".join(status.problems)
        remedy = "Choose another master_port=, or leave it out for a free one."
        return problem("ports", f"another program answers at {where}: {words}", remedy)
    except DeadlineError as error:
        nobody = str(error)
    try:
        listen(where).close()
    except (SenderBusyError, WeightSyncError) as error:
        return warning(
            "ports",
            f"{nobody}, and this host cannot listen there: {error}",
            "On the trainer's host that is to be mended; on a receiver's, start the trainer and "
            "look again.",
        )
    return ok("ports", f"{where} can be listened at; a firewall cannot be seen from here")
