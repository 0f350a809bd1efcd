"""Writes `incidents.jsonl`, one line per failure, and `bad/`, the steps that were set aside for inspection."""

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
from freerun.persistence.files import write_json

logger = logging.getLogger("freerun")

MOST_SET_ASIDE = 20
"""Episodes that are stored at most: a policy that has gone wrong would fill the disk with more of the same."""


class IncidentFile:
    """Takes incidents from any thread. Before a run has a folder, incidents wait for it."""

    def __init__(self) -> None:
        # Collectors report from the threads that watch their workers, while the main thread opens and closes the file.
        self._lock = threading.Lock()
        self._waiting: list[Incident] = []
        self._folder: Path | None = None
        self._file: TextIO | None = None
        self._num_set_aside = 0
        self._redact: Callable[[str], str] = str
        self.by_kind: Counter[str] = Counter()

    def open(self, folder: Path, redact: Callable[[str], str] = str) -> None:
        """Write to the folder of this run from now on. `redact` takes secrets out of a text.

        If the workers serve several runs in a row, this is called for each.
        """
        with self._lock:
            self._close()
            self._folder, self._redact = folder, redact
            # Workers start before the folder is made, so some may have failed already.
            for incident in self._waiting:
                self._write(incident)
            self._waiting = []

    def __call__(self, incident: Incident) -> None:
        """Count and write one incident."""
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
        self._num_set_aside = 0

    def _write(self, incident: Incident) -> None:
        try:
            self._write_line(incident)
        except OSError as error:  # a full disk must not end a run
            logger.warning("the incident of worker %d could not be written: %s", incident.worker, error.strerror)

    def _write_line(self, incident: Incident) -> None:
        assert self._folder is not None
        line = {
            field.name: getattr(incident, field.name)
            for field in dataclasses.fields(incident)
            if field.name != "evidence"
        }
        line["text"] = self._redact(incident.text)
        if incident.evidence is not None and self._num_set_aside < MOST_SET_ASIDE:
            self._num_set_aside += 1
            line["kept_in"] = str(self._set_aside(incident).relative_to(self._folder))
        if self._file is None:
            # Opened by the first incident, so that a run without any has no such file. Buffering by lines puts each
            # incident into the file at once.
            self._file = (self._folder / "incidents.jsonl").open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(line) + "\n")

    def _set_aside(self, incident: Incident) -> Path:
        """Store the steps as .npz, without pickle, and a JSON file beside them that says what they are."""
        assert self._folder is not None
        assert incident.evidence is not None
        folder = self._folder / "bad"
        folder.mkdir(exist_ok=True)
        name = "update" if incident.episode is None else f"episode-{incident.episode}"
        path = folder / f"{name}.npz"
        number = 2
        while path.exists():  # an episode may fail again when it is run again
            path, number = folder / f"{name}-{number}.npz", number + 1
        arrays = {name: getattr(incident.evidence, name) for name in SEGMENT_ARRAYS}
        np.savez_compressed(path, allow_pickle=False, **arrays)
        about = {"episode": incident.episode, "seed": incident.seed, "text": self._redact(incident.text)}
        write_json(path.with_suffix(".json"), about)
        return path
