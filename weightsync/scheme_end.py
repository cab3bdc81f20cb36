"""What sender and receivers have in common: a ``with`` block ends them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from typing_extensions import Self


class SchemeEnd(ABC):
    """One end of a scheme."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
