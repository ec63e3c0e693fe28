"""Formats of quantised weights, as options name them."""

from enum import StrEnum

WeightFormat = StrEnum("WeightFormat", ["INT8", "FP8", "NF4"])
