"""The papers' tables and figures on real data, one file each; results/ keeps numbers and pictures."""

PAPERS = {  # short name, with which the names of experiments begin -> title on the pages
    "attns": "AttNS, hybrid solvers",
    "stepnet": "StepNet, stiffness and gates",
    "pde": "PDE attention",
}
