"""``Parallel`` with restarts: ranks of which one was killed, or hangs, are forked again and resume."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.multiprocessing.spawn import ProcessException

from ignite_engine import devices
from ignite_engine.errors import check_type, is_whole
from ignite_engine.ranks import launch
from ignite_engine.ranks.joining import is_launched
from ignite_engine.ranks.watch import HEARTBEAT_TIMEOUT_S

logger = logging.getLogger(__name__)


class Parallel(launch.Parallel):
    """Launch a function on one process or many; arguments and use are those of ``idist.Parallel``, and these.

    Args:
        timeout: how long a rank waits for another one, in every group, ours included; seconds or a timedelta.
            None: torch's own (30 min on gloo, 10 min on nccl).
        heartbeat_timeout: seconds without a sign of life from a rank, after which all ranks end; they watch each other
            while the function runs (:class:`~ignite_engine.ranks.watch.Watch`).
        restarts: how often in an hour the ranks may be started again, after one was killed by a signal, by the system
            for its memory, say, or hangs. The function begins anew: ``checkpoint.resume()`` in it continues the run.
            None: never.

    What happens at a signal, a failure and the end is said at :class:`ignite_engine.ranks.launch.Parallel`.

    With ``restarts`` this process forks the ranks, also where there is one of them. It has imported what they need and
    must not have used an accelerator. When a rank is killed all others are killed at once, which what they were saving
    survives, and the ranks are forked again. An iteration at which a rank dies twice is named and ends the run. A stop
    that the ranks have agreed on ends it, too. Under a launcher such as torchrun, which has restarts of its own, these
    have no effect.

    Raises:
        TypeError: an option that does not exist, or does not go with ``restarts``.
        ValueError: a number that is too small or too large.
        LaunchError: (when it is entered, or run) the ranks cannot meet, because the port is in use, say; or this
            process cannot fork them. One line.
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        *,
        init_method: str | None = None,
        timeout: float | timedelta | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT_S,
        restarts: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            backend,
            nproc_per_node,
            init_method=init_method,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            **options,
        )
        self._restarts = restarts
        if restarts is not None:
            check_type("restarts", restarts, is_whole(restarts), "a whole number, of an hour")
            if restarts < 1:
                raise ValueError(f"restarts must be at least 1, got {restarts}; leave it out for none.")
            for name, value in {"init_method": init_method, **options}.items():
                if name in ("init_method", "start_method", "nnodes") and value not in (None, "env://", "fork", 1):
                    raise TypeError(
                        f"Parallel got {name}={value!r} with restarts, which forks ranks here: leave it out."
                    )
            if is_launched():
                if os.environ.get("RANK", "0") == "0":
                    logger.warning("restarts has no effect: the launcher that started this rank restarts it.")
                self._restarts = None
            else:
                devices.look_without_using()

    def __enter__(self) -> Parallel:
        if self._restarts is None:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._restarts is None:
            super().__exit__(*error)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``func(local_rank, *args, **kwargs)`` on every rank, with ``restarts`` until it has ended there.

        Raises:
            SystemExit: a rank ended with one; its code, the largest if they differ. Or a signal ended it.
            ProcessRaisedException: (of torch) the error of the rank that failed first, with its traceback.
            ProcessExitedException: (of torch) a rank was killed; with ``restarts`` the message says why the ranks are
                not started again.
        """
        try:
            if self._restarts is None:
                super().run(func, *args, **kwargs)
            else:
                self._supervise(self._restarts, func, args, kwargs)
        except ProcessException as error:  # its message says what happened, not the way from there to here
            raise error.with_traceback(None) from None

    def _supervise(
        self, restarts: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from ignite_engine.ext.recovery.supervisor import Supervisor

        work = self._watched(func, args, kwargs)
        Supervisor(self.backend, self._spawn_params or {}, self._timeout, restarts).run(work)
