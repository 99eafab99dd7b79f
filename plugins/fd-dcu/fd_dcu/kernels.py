"""Cells of the kernel table. None: this build of PaddlePaddle brings the ordinary GPU kernels, and
FastDeploy 2.x's own operators for it were a demonstration."""

from __future__ import annotations

TABLE: dict[str, str] = {}
