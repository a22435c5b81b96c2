"""TRIDENT's features_<encoder>/<slide>.h5: geometry in the attributes of coords."""

from __future__ import annotations

from pathlib import Path

from deco_ray.cohort.readers import hdf5
from deco_ray.cohort.readers.raw import RawSlide, bag_features, number, pixel_coords, whole_number


def read(path: Path) -> RawSlide:
    with hdf5.opened(path) as file:
        features = bag_features(hdf5.dataset(file, "features")[()])
        coords = hdf5.array(file, "coords")
        attributes = {} if coords is None else hdf5.numbers(file["coords"])
    return RawSlide(
        features,
        pixel_coords(coords, len(features)),
        number(attributes.get("patch_size_level0")),
        whole_number(attributes.get("level0_width")),
        whole_number(attributes.get("level0_height")),
    )
