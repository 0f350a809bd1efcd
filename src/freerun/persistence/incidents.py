"""`incidents.jsonl`: one line per failure of a worker; `bad/`: steps that were kept aside, to be looked at."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import numpy as np

from freerun.core import SEGMENT_ARRAYS, Incident
from freerun.persistence.files import write_atomically

logger = logging.getLogger("freerun")

MOST_KEPT_ASIDE = 20
"""Episodes; a policy that has gone wrong would fill the disk with more of the same."""


class IncidentFile:
    """Called by collectors, from any thread; before there is a folder, what is told waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Incident] = []
        self._folder: Path | None = None
        self._file: TextIO | None = None
        self._num_kept_aside = 0
        self._cover: Callable[[str], str] = str
        self.by_kind: Counter[str] = Counter()

    def open(self, folder: Path, cover: Callable[[str], str] = str) -> None:
        """Of a run; of the next one, if the workers serve several. `cover` takes out what no file may hold."""
        with self._lock:
            self._close()
            self._folder, self._cover = folder, cover
            for incident in self._waiting:
                self._write(incident)
            self._waiting = []

    def __call__(self, incident: Incident) -> None:
        with self._lock:
            self.by_kind[incident.kind] += 1
            if self._folder is None:
                self._waiting.append(incident)
            else:
                self._write(incident)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._folder = None
        self._num_kept_aside = 0

    def _write(self, incident: Incident) -> None:
        try:
            self._note(incident)
        except OSError as error:  # a full disk is no reason to end a run
            logger.warning("what became of worker %d could not be noted: %s", incident.worker, error.strerror)

    def _note(self, incident: Incident) -> None:
        assert self._folder is not None
        line = {
            field.name: getattr(incident, field.name)
            for field in dataclasses.fields(incident)
            if field.name != "evidence"
        }
        line["text"] = self._cover(incident.text)
        if incident.evidence is not None and self._num_kept_aside < MOST_KEPT_ASIDE:
            self._num_kept_aside += 1
            line["kept_in"] = str(self._keep_aside(incident).relative_to(self._folder))
        if self._file is None:
            self._file = (self._folder / "incidents.jsonl").open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(line) + "\n")

    def _keep_aside(self, incident: Incident) -> Path:
        """Arrays as .npz without pickle, and beside them what they are."""
        assert self._folder is not None
        assert incident.evidence is not None
        folder = self._folder / "bad"
        folder.mkdir(exist_ok=True)
        name = "update" if incident.episode is None else f"episode-{incident.episode}"
        path = folder / f"{name}.npz"
        number = 2
        while path.exists():
            path, number = folder / f"{name}-{number}.npz", number + 1
        arrays = {name: getattr(incident.evidence, name) for name in SEGMENT_ARRAYS}
        np.savez_compressed(path, allow_pickle=False, **arrays)
        about = {"episode": incident.episode, "seed": incident.seed, "text": self._cover(incident.text)}
        write_atomically(path.with_suffix(".json"), (json.dumps(about, indent=2) + "\n").encode())
        return path
