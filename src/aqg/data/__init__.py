"""Datasets (downloaded, verified, cached) and the ways to split them among clients."""

from aqg.data.datasets import DATASETS, Dataset, data_directory, load_dataset
from aqg.data.partitions import PARTITIONS, parse_partition

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "data_directory", "load_dataset", "parse_partition"]
