"""A run as people see it in a terminal: a few lines, and two tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weightsync.cli.output import harmless, seconds_words, tensors_words
from weightsync.inspection import Lag, RunStatus, SlotStatus
from weightsync.report import ReceiverReport
from weightsync.version import Version
from weightsync.words import size

_COLOURS = {
    "applied": "green",
    "connected": "cyan",
    "leased": "cyan",
    "written": "yellow",
    "waiting": "yellow",
    "rolled back": "yellow",
    "unusable": "red",
    "failed": "red",
    "dead": "red",
}


def view(status: RunStatus, now: float, within: bool = False) -> RenderableType:
    """
    Args:
        now: seconds since 1970.
        within: it is one of a fallback's, whose receivers are those of all of them.
    """
    parts: list[RenderableType] = [_where(status), _facts(status, now)]
    if status.slots:
        parts += [Text(), _slots(status)]
    if status.receivers and not within:
        parts += [Text(), _receivers(status, now)]
    for report in status.receivers:
        parts += [
            Text(harmless(f"{report.receiver}: {words}"), style="red") for words in _words(report)
        ]
    for member in status.members:
        parts += [Text(), Padding(view(member, now, within=True), (0, 0, 0, 2))]
    return Group(*parts)


def _where(status: RunStatus) -> Text:
    """A text and no row of a table: a path that does not fit beside the word goes below it."""
    word = "run".ljust(_label_width(status) + 2)
    return Text.assemble((word, "dim"), f"{status.path} ({status.scheme})", overflow="fold")


def _label_width(status: RunStatus) -> int:
    shown = {"receivers": not status.receivers, "not seen": status.unseen, "version": True}
    return max(len(label) for label, is_there in shown.items() if is_there)


def _facts(status: RunStatus, now: float) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("version", _newest(status, now))
    facts.add_row("sender", _sender(status))
    if not status.receivers:
        facts.add_row("receivers", Text("none", style="dim"))
    for problem in status.problems:
        facts.add_row(Text("problem", style="red"), Text(harmless(problem), style="red"))
    for words in status.unseen:
        facts.add_row("not seen", Text(harmless(words), style="dim"))
    return facts


def _newest(status: RunStatus, now: float) -> Text:
    if status.version is None:
        return Text("none yet" if not status.problems else "not known", style="yellow")
    words = f"{status.version.number} of epoch {status.version.epoch}"
    if status.tensors:
        words += f", {size(status.nbytes)} in {tensors_words(status.tensors)}"
    if status.time is not None:
        words += f", {seconds_words(now - status.time)} ago"
    return Text(words)


def _sender(status: RunStatus) -> Text:
    said = harmless(status.sender)
    who = f": {said}" if said else ""
    if status.sender_alive is None:
        return Text(f"not known whether it is alive{who}", style="yellow")
    if status.sender_alive:
        return Text(f"alive{who}", style="green")
    if status.sender_ended:
        return Text(f"has ended{who}")
    return Text(f"dead, and has not ended by itself{who}" if who else "none", style="yellow")


def _table(*columns: str, folded: tuple[str, ...]) -> Table:
    """Where a terminal is narrow, long names are folded, and the other columns stay whole."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name not in folded)
    return table


def _slots(status: RunStatus) -> Table:
    table = _table("slot", "version", "state", "size", folded=("slot",))
    for slot in status.slots:
        nbytes = "" if slot.nbytes is None else size(slot.nbytes)
        table.add_row(Text(slot.place), _number(slot.version, status), _state(slot), nbytes)
    return table


def _state(of: SlotStatus | ReceiverReport) -> Text:
    return Text(of.state, style=_COLOURS.get(of.state, ""))


def _receivers(status: RunStatus, now: float) -> Table:
    columns = "receiver", "state", "holds", "behind", "process"
    table = _table(*columns, folded=("receiver", "process"))
    for report in status.receivers:
        table.add_row(
            Text(harmless(report.receiver)),
            _state(report),
            _number(report.version, status),
            _behind(status.lag(report, now)),
            Text(harmless(f"{report.pid} on {report.host}") if report.pid else "", style="dim"),
        )
    return table


def _words(report: ReceiverReport) -> list[str]:
    own = [report.error] if report.error else []
    several = report.engines if len(report.engines) > 1 else ()
    return own + [str(engine) for engine in several if engine.state not in ("applied", "connected")]


def _number(version: Version | None, status: RunStatus) -> Text:
    """The number alone, of the newest version's epoch; of another both."""
    if version is None:
        return Text("-", style="dim")
    same = status.version is not None and version.epoch == status.version.epoch
    return Text(str(version.number if same else version))


def _behind(lag: Lag | None) -> Text:
    if lag is None:
        return Text("-", style="dim")
    count = "all" if lag.versions is None else str(lag.versions)
    words = count if lag.seconds is None else f"{count}, {seconds_words(lag.seconds)}"
    return Text(words, style="yellow")
