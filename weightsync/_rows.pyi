import numpy as np
import numpy.typing as npt

def move(
    into: npt.NDArray[np.int64],
    out_of: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    begin: int,
    end: int,
    stream: bool,
) -> None: ...
