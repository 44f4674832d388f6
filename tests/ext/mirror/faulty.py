"""A store, ``faulty://DIRECTORY`` for fsspec, that fails, waits or kills where a test wants it to."""

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Faulty(LocalFileSystem):
    """Files of a directory.

    Attributes:
        seen: operations on files of checkpoints, as ``("write", "iteration_00000002/shared.safetensors")``.
        fault: called with each before it is done; may raise, wait, or end the process.
    """

    protocol = "faulty"
    cachable = False
    seen = []
    fault = staticmethod(lambda operation, name: None)

    def __init__(self, **options):
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def _note(self, operation, path):
        name = "/".join(str(path).rstrip("/").split("/")[-2:])
        Faulty.seen.append((operation, name))
        Faulty.fault(operation, name)

    def ls(self, path, detail=False, **options):
        self._note("list", path)
        return super().ls(path, detail=detail, **options)

    def cat_file(self, path, *arguments, **options):
        self._note("read", path)
        return super().cat_file(path, *arguments, **options)

    def pipe_file(self, path, value, **options):
        self._note("write", path)
        return super().pipe_file(path, value, **options)

    def open(self, path, mode="rb", **options):
        self._note("read" if mode == "rb" else "write", path)
        return super().open(path, mode, **options)

    def rm_file(self, path):
        self._note("remove", path)
        return super().rm_file(path)


def install():
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.seen, Faulty.fault = [], staticmethod(lambda operation, name: None)
    return Faulty
