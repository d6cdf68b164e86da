"""All clients in this process, one task after the other: the transport of tests, notebooks and small runs."""

from concurrent.futures import Future
from pathlib import Path

from ekiden.engine.store import FolderJournal
from ekiden.engine.worker import Job, Outcome, Worker


class InProcess:
    """Executes a job at once, in the caller's thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def submit(self, job: Job, journal: Path | None, digest: str) -> Future[Outcome]:
        """Do the job; the future is done when this returns."""
        future: Future[Outcome] = Future()
        future.set_result(self._worker.execute(job, FolderJournal(journal) if journal else None, digest))
        return future

    def close(self) -> None:
        """Nothing to release."""
