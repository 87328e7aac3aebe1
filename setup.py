"""Packaging of moeblaze-megatron; `pip install -e .` is the development install."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = (ROOT / "moeblaze_megatron" / "version.py").read_text().split('"')[1]

# megatron.training and its checkpoints import yaml, six and psutil without declaring them; a
# checkout of Megatron-LM compiles its datasets' helpers with pybind11.
MEGATRON = ["megatron-core>=0.19,<0.20", "pyyaml", "six", "psutil", "pybind11"]
PLOTS = ["matplotlib"]
# Triton 3.6's interpreter fails on loops with loaded bounds from numpy 2.4 on. A minor version of
# ruff may format differently.
TEST = [*MEGATRON, *PLOTS, "numpy<2.4", "pytest>=8", "pytest-timeout", "ruff>=0.17,<0.18"]

setup(
    name="moeblaze-megatron",
    version=VERSION,
    description="Mixture-of-experts layers for Megatron-Core without permuted token buffers",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["moeblaze_megatron", "moeblaze_megatron.*"]),
        "moeblaze_megatron.patches",
    ],
    package_dir={"moeblaze_megatron.patches": "patches"},
    package_data={
        "moeblaze_megatron.ops": ["configurations.json"],
        "moeblaze_megatron.patches": ["*.patch", "README.md"],
    },
    install_requires=["torch>=2.10", "triton>=3.6", "packaging"],
    extras_require={"megatron": MEGATRON, "plots": PLOTS, "test": TEST},
)
