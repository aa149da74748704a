"""What has been sent, on disk, so that an interrupted run resumes there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quarrel.errors import RequestError


@dataclass(frozen=True)
class State:
    """rows: finished rows of the input. sent: vectors that arrived, also the id after the last of them. bad: rows in
    the dead letter file, `letters` its bytes. done: nothing is left."""

    rows: int = 0
    sent: int = 0
    bad: int = 0
    letters: int = 0
    done: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A file that is replaced whole. `job` names everything that the vectors and their ids depend on."""

    path: Path
    job: dict[str, Any]

    def load(self) -> State:
        """The state that was saved, or the first one. RequestError where the file is of another job."""
        try:
            read = json.loads(self.path.read_text("utf-8"))
            job, state = read["job"], State(**read["state"])
        except FileNotFoundError:
            return State()
        except (ValueError, KeyError, TypeError):
            raise RequestError(
                f"the checkpoint {self.path} cannot be read: delete it to begin again, once the target is empty"
            ) from None
        for name in sorted({*job, *self.job}):
            if job.get(name) != self.job.get(name):
                was, now = job.get(name), self.job.get(name)
                raise RequestError(
                    f"the checkpoint {self.path} is of another run ({name} was {was!r}, is {now!r}):"
                    " delete it to begin again, or name another by --checkpoint"
                )
        return state

    def save(self, state: State) -> None:
        """On disk when this returns."""
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"job": self.job, "state": asdict(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


class DeadLetters:
    """JSON lines of the rows that could not be embedded. What an earlier run wrote after its checkpoint is cut off."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        self._file = path.open("ab")
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)
        self.length = length

    def add(self, row: int, fault: str, text: str) -> None:
        line = json.dumps({"row": row, "error": fault, "text": text[:2000]}) + "\n"
        self.length += self._file.write(line.encode())

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self.length == 0:
            self.path.unlink(missing_ok=True)
