"""Adapters to the frameworks that people already run; thin: all behaviour is the core's."""
