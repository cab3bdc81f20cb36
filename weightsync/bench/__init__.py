"""Benchmarks: our schemes beside other ways of moving weights, and what a machine will give.

``weightsync bench`` is its command. Each *way* (:mod:`weightsync.bench.way`) is tried in *turns*
(:mod:`weightsync.bench.turn`): a trainer's process and its receivers' are started, one cold version
and some warm ones are moved and compared bit for bit, and all is taken down again. A *suite*
(:mod:`weightsync.bench.suite`) interleaves the turns of all ways, so that a machine whose speed
drifts drifts for all of them.
"""
