"""The one thing pyproject.toml cannot say everywhere yet: an extension that may fail to build."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("weightsync._rows", ["weightsync/_rows.c"], optional=True)])
