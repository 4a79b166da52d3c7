"""Graph passes, one a file: ``name(graph_module, *, ...) -> graph_module``.

Each states what it expects and what holds afterwards; :mod:`zero_compile.verify` checks it.
"""
