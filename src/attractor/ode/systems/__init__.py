"""Equations of motion, one a file.

A system is a small frozen class: it is a rate ``system(t, u) -> du``, knows its `dim`, draws
initial states with ``sample(n, generator=None, dtype=None, device=None) -> [n, dim]``, and has
``energy(u) -> [*batch]`` where something like an energy is conserved and ``exact(t, u0) ->
[len(t), *batch, dim]`` (states at times t after u0) where a solution is known.

To add one: write such a class in a file of its own and add a line here; `tests/contracts.py` then
tests it.

>>> import torch
>>> spring = HarmonicOscillator(omega=2.0)
>>> spring(0.0, torch.tensor([1.0, 0.0]))
tensor([ 0., -4.])
"""

from attractor.ode.systems.burgers import Burgers
from attractor.ode.systems.elastic_pendulum import ElasticPendulum
from attractor.ode.systems.harmonic_oscillator import HarmonicOscillator
from attractor.ode.systems.henon_heiles import HenonHeiles
from attractor.ode.systems.hires import HIRES
from attractor.ode.systems.logistic import Logistic
from attractor.ode.systems.lorenz import Lorenz
from attractor.ode.systems.oregonator import Oregonator
from attractor.ode.systems.pendulum_chain import PendulumChain
from attractor.ode.systems.pollution import Pollution
from attractor.ode.systems.robertson import Robertson
from attractor.ode.systems.spring_mass import SpringMass
from attractor.ode.systems.system import System
from attractor.ode.systems.three_body import ThreeBody
from attractor.ode.systems.van_der_pol import VanDerPol

__all__ = [
    "HIRES",
    "Burgers",
    "ElasticPendulum",
    "HarmonicOscillator",
    "HenonHeiles",
    "Logistic",
    "Lorenz",
    "Oregonator",
    "PendulumChain",
    "Pollution",
    "Robertson",
    "SpringMass",
    "System",
    "ThreeBody",
    "VanDerPol",
]
