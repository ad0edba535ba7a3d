"""Datasets (downloaded, verified, cached) and the ways to split them among clients."""

from aqg.data.datasets import (
    DATASETS,
    Dataset,
    DatasetInfo,
    data_directory,
    is_dataset_file,
    load_dataset,
)
from aqg.data.partitions import (
    PARTITIONS,
    Partition,
    format_partition_table,
    parse_partition,
    partition_table,
)

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "DatasetInfo",
    "Partition",
    "data_directory",
    "format_partition_table",
    "is_dataset_file",
    "load_dataset",
    "parse_partition",
    "partition_table",
]
