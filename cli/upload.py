"""``memtrace upload``: copy a trace on disk to a storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import print_confirmation, working
from memtrace.cli.paths import PathOrUrl

from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, StoragePath, to_path


@click.command("upload")
@click.argument("trace", type=PathOrUrl())
@click.argument("url")
@click.option("--remove", is_flag=True, help="Delete TRACE once all of it is uploaded.")
def command(trace: AnyPath, url: str, remove: bool) -> None:
    """Upload TRACE, a folder on disk, to URL in any storage that fsspec opens.

    Use it to finish the upload of a trace that was recorded to a URL while the storage could not be used. Files that
    are in the storage already are not sent again, so an upload that was cut off can be continued.

    \b
    Examples:
      memtrace upload memtrace-uploads/run-1a2b3c4d.memtrace s3://bucket/run
      memtrace upload run.memtrace gs://bucket/runs/first.memtrace --remove
    """
    from memtrace.recording.upload import upload_trace

    target = to_path(url)
    if not isinstance(target, StoragePath):
        raise MemtraceError(f"{url} is not the URL of a storage. Pass a URL such as s3://bucket/run.memtrace.")
    if not isinstance(trace, Path):
        raise MemtraceError(f"{trace} is in a storage already. Pass a trace on disk.")
    with working(f"uploading {trace}"):
        ranks = upload_trace(trace, target)
    if remove:
        shutil.rmtree(trace)
    print_confirmation(f"Uploaded {trace} ({len(ranks)} rank{'s' if len(ranks) > 1 else ''}) to {target}.")
    FEEDBACK.note(f"Next: memtrace summary {target}")
