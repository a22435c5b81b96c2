"""The anchors artefact: morphology anchors, normal prototypes and which of them stands in for which anchor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deco_ray.anchors.lloyd import nearest
from deco_ray.anchors.matching import match_normals
from deco_ray.errors import DecoError

FILE = "anchors.npz"


class AnchorError(DecoError):
    """Stored anchors cannot be read, or not be applied to these features."""


@dataclass(frozen=True, eq=False)
class Anchors:
    """H [K, d], the normal prototypes [K_n, d] and the match [K] between them; all rows have unit length."""

    anchors: np.ndarray  # float32 [K, d]
    normals: np.ndarray  # float32 [K_n, d]
    match: np.ndarray  # int64 [K], index into normals

    @classmethod
    def of(cls, anchors: np.ndarray, normals: np.ndarray) -> Anchors:
        return cls(anchors, normals, match_normals(anchors, normals))

    @classmethod
    def load(cls, path: str | Path) -> Anchors:
        """From an artefact folder or its anchors.npz."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        try:
            with np.load(file, allow_pickle=False) as saved:
                found = cls(saved["anchors"], saved["normals"], saved["match"])
            found.check()
            return found
        except FileNotFoundError:
            raise AnchorError(f"no anchors at {file}; run the anchors stage first") from None
        except Exception as error:  # a damaged archive raises whatever NumPy, zip and zlib stumble over
            raise AnchorError(
                f"{file} is damaged: {error}; remove its folder and run the anchors stage again"
            ) from error

    def check(self) -> None:
        """Refuses arrays that do not belong together."""
        anchors, normals, match = self.anchors, self.normals, self.match
        if anchors.ndim != 2 or normals.ndim != 2 or anchors.shape[1] != normals.shape[1]:
            raise ValueError(f"anchors {anchors.shape} and normal prototypes {normals.shape} do not fit")
        if match.shape != anchors.shape[:1] or not np.isin(match, np.arange(len(normals))).all():
            raise ValueError("the match does not name a normal prototype for every anchor")

    def save(self, folder: str | Path) -> None:
        np.savez(Path(folder) / FILE, anchors=self.anchors, normals=self.normals, match=self.match)

    @property
    def k(self) -> int:
        return len(self.anchors)

    @property
    def replacements(self) -> np.ndarray:
        """What each anchor's patches are replaced by [K, d]: its matched normal prototype."""
        return self.normals[self.match]

    def assign(self, features: Any) -> np.ndarray:
        """The cosine-nearest anchor of each patch, int64 [N], for features [N, d] of any length (NumPy or torch)."""
        rows = features.detach().cpu().numpy() if hasattr(features, "detach") else np.asarray(features)
        if rows.ndim != 2 or rows.shape[1] != self.anchors.shape[1]:
            raise AnchorError(f"features {list(rows.shape)} do not fit anchors of dimension {self.anchors.shape[1]}")
        cosines, found = nearest(rows, self.anchors)  # Eq. 4
        suspect = np.flatnonzero((found < 0) | ~np.isfinite(cosines) | (cosines == 0))
        bad = [row for row in suspect if not np.isfinite(rows[row]).all() or not rows[row].any()]
        if bad:
            raise AnchorError(
                f"patch {int(bad[0])} is a zero vector or not finite, as are {len(bad) - 1} more of {len(rows)}: "
                "cosine needs a direction"
            )
        return found
