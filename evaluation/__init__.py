"""Evaluation of the quality, speed and cost of every mode and baseline (``rapid eval``).

A *task* is one YAML file. It says where its items come from, how they are worded and scored, and
which systems and conditions are compared. A *run* answers every (item, system, condition) once, in
process or through a server, and writes one JSON line per answer. Reports are made from those lines
alone.

::

    loaders -> items -> prompting (corruption) -> in_process | over_http -> metrics -> results
    results -> run_results (statistics, flops) -> report, plots
"""
