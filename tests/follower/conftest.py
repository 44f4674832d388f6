from __future__ import annotations

from tests.mirror.conftest import proxy, s3, s3_port

__all__ = ["proxy", "s3", "s3_port"]
