"""The papers' tables and figures on real data, one file each; results/ keeps numbers and pictures."""

PAPERS = {  # short name, with which the names of experiments begin -> title on the pages
    "attns": "AttNS, hybrid solvers",
    "stepnet": "StepNet, stiffness and gates",
    "pde": "PDE attention",
}
UNCOVERED = {  # tables and figures with results for which there is no experiment
    "pde": ("Fig. 6", "Fig. 11", "Fig. 14", "Fig. 15"),
}
