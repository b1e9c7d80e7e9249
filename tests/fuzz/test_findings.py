"""What fuzzing found, each with the call that showed it; all of them were something else than a clear error."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import attractor as at
from attractor.attention import (
    Classifier,
    LanguageModel,
    Parts,
    PDEAttention,
    PDECache,
    RandomFeatures,
    context_parallel_attention,
    hybrid_errors,
    performer_attention,
    trace,
    window_attention,
)
from attractor.attention.pdes import LearnedPDE, Line, evolve, for_length
from attractor.data import images, text
from attractor.integrations import onnx, timm
from attractor.integrations import scipy as scipys
from attractor.integrations import transformers as transformers_
from attractor.ode import Paper, Ridge, theory
from attractor.ode.substeps import whole_steps
from attractor.ode.trajectories import Plan
from attractor.ode.trust import TrustRegion
from attractor.residual import Backbone, ResNet, StiffnessProfile, compare_profiles, kendall, vit
from attractor.residual.resnet import BasicBlock
from attractor.residual.stages import stage_numbers
from tests.fuzz.judging import Call, Finding, Target, judge
from tests.fuzz.strategies import Maker
from tests.fuzz.targets.ode import solver, tuned

ONES, META = torch.ones(2, 3), torch.ones(2, 3, device="meta")
TIMES = torch.linspace(0, 1, 3)
Q = torch.ones(1, 2, 4, 8)
STAGE = torch.tensor([0, 0, 0])


def rate(t, u):
    return -u


def attend(**changes):
    return at.pde_attention(**{"query": Q, "key": Q, "value": Q, "pde": "diffusion", **changes})


def correction(dtype=torch.float32):
    return at.corrections.AttNS(3, width=4, dtype=dtype)


def event(event_fn=lambda t, y: t - 1, t0=TIMES[:1], **options):
    return at.odeint_event(rate, torch.ones(2), t0, event_fn=event_fn, **options)


def model():
    return LanguageModel(11, dim=8, heads=2, layers=1, hidden=8, max_tokens=8).eval()


CASES = {
    # the core
    "a tableau that divides by zero": (
        lambda: at.Scheme("s", a=[[]], b=["1/0"], c=[0], order=1),
        "not a list of coefficients",
    ),
    "a correction that returns a number": (
        lambda: at.evolve(rate, ONES, TIMES, correction=lambda u, slope, dt: 1.0),
        "the correction returned a float",
    ),
    "kicks of states without components": (
        lambda: at.schemes.LEAPFROG.check_rate(rate, 0.0, torch.ones(2, 0)),
        "even size",
    ),
    "steps of their own for q and p": (
        lambda: at.schemes.LEAPFROG.slope(rate, 0.0, torch.ones(2, 4), torch.ones(2, 4)),
        "q and p are stepped together",
    ),
    "a step that is nothing": (lambda: at.schemes.RK4.slope(rate, 0.0, ONES, None), "dt is a NoneType"),
    "a time that is a text": (lambda: at.schemes.RK4.slope(rate, "0", ONES, 0.1), "t is a str"),
    "a step elsewhere": (
        lambda: at.schemes.RK4.slope(rate, 0.0, ONES, torch.tensor(0.1, device="meta")),
        "dt is on meta",
    ),
    "odeint, parts without rates": (
        lambda: at.odeint(lambda t, y: (1.0, 1.0), (ONES, ONES), TIMES),
        "func returned tuple",
    ),
    "odeint, too many steps": (
        lambda: at.odeint(rate, ONES, TIMES, method="rk4", options={"step_size": 1e-300}),
        "pass a larger one",
    ),
    "odeint, several step sizes": (
        lambda: at.odeint(rate, ONES, TIMES, method="rk4", options={"step_size": ONES}),
        "must be positive",
    ),
    "odeint, a list for a factor": (
        lambda: at.odeint(rate, ONES, TIMES, options={"ifactor": [10.0]}),
        "grow is a list",
    ),
    "coefficients beyond all numbers": (
        lambda: for_length("wave", 10_000, reference=1, gamma=300.0),
        "beyond all numbers",
    ),
    "a step for other states": (
        lambda: at.corrections.AttNSM(3, width=4).gain(ONES, torch.ones(4, 1)),
        "does not broadcast",
    ),
    "a step for other states, of the slope": (
        lambda: at.corrections.AttNS(3, width=4, times_dt=True)(ONES, ONES, torch.ones(4, 1)),
        "does not broadcast",
    ),
    "a step that is not real": (
        lambda: at.schemes.RK4.slope(rate, 0.0, ONES, torch.tensor(1j)),
        "steps must be real",
    ),
    "a Lipschitz constant of no step": (
        lambda: theory.lipschitz_observed(correction(), ONES, ONES, torch.tensor(1j)),
        "must be a number",
    ),
    "second derivatives at other times": (
        lambda: theory.second_derivative(rate, ONES, torch.ones(4, 1)),
        "does not broadcast",
    ),
    "a region of nearly nothing": (
        lambda: TrustRegion.around(torch.tensor([[-2.1342e-30, -9.6059e-31, 9.3593e-31]] * 9)),
        "have no region",
    ),
    "a normalisation of another type": (
        lambda: at.gates.IEBN(3).bfloat16()(torch.rand(2, 3, 4, 4).half()),
        "f is torch.float16, but this IEBN is torch.bfloat16",
    ),
    "fine steps without end": (
        lambda: at.make_trajectories(
            at.systems.Lorenz(), "nowhere", trajectories=2, dt=0.1, horizon=0.2, fine_dt=1e-30
        ),
        "makes more than",
    ),
    "probe within a number": (
        lambda: at.probe(nn.Linear(4, 4), [torch.ones(2, 4)], within=3),
        "within is a int",
    ),
    "evolve on meta": (lambda: at.evolve(rate, META, TIMES), "meta device"),
    "evolve, times on meta": (lambda: at.evolve(rate, ONES, TIMES.to("meta")), "meta device"),
    "evolve, times are text": (lambda: at.evolve(rate, ONES, "now"), "t is 'now'"),
    "evolve, complex times": (lambda: at.evolve(rate, ONES, TIMES * 1j), "times must be real"),
    "evolve, every is no whole number": (lambda: at.evolve(rate, ONES, TIMES, every=1.5), "every = 1.5"),
    "evolve, checkpoint is text": (lambda: at.evolve(rate, ONES, TIMES, checkpoint="yes"), "checkpoint = 'yes'"),
    "odeint, tuple of two devices": (lambda: at.odeint(lambda t, y: y, (ONES, META), TIMES), "one device"),
    "Scheme of no rows": (lambda: at.Scheme("x", [1, 2], [1], [0], 1), "list of rows"),
    "slope of text": (lambda: at.schemes.RK4.slope(rate, 0.0, "u", 0.1), "u is a str"),
    "leapfrog on meta": (lambda: at.schemes.LEAPFROG.check_rate(rate, 0.0, torch.ones(4, device="meta")), "meta device"),
    "jacobian of a list": (lambda: at.stiffness.jacobian(rate, [1.0]), "u is a list"),
    "jacobian of no components": (lambda: at.stiffness.jacobian(rate, torch.ones(2, 0)), "d of at least 1"),
    "jacobian of integers": (lambda: at.stiffness.stiffness_index(rate, torch.ones(2, dtype=torch.int64)), "pass floats"),
    "SAI of a tensor": (lambda: at.stiffness.stiffness_aware_index(ONES), "pass a Trajectory"),
    "SAI, times that do not fit": (
        lambda: at.stiffness.stiffness_aware_index(
            at.Trajectory(torch.zeros(5), torch.ones(3, 2), at.Stats(0, 0, 0), ONES > 0, ONES)
        ),
        r"must be \[n\+1\]",
    ),
    "NSI of two types": (lambda: at.stiffness.neural_stiffness_index(ONES, ONES.double()), "one dtype"),
    "NSI of two devices": (lambda: at.stiffness.neural_stiffness_index(ONES, META), "x_next is on meta"),
    "NSI of text": (lambda: at.stiffness.neural_stiffness_index("x", ONES), "x is a str"),
    "TNS of a list": (lambda: at.stiffness.total_neural_stiffness([[1.0]], STAGE), "nsi is a list"),
    "TNS of bytes": (lambda: at.stiffness.total_neural_stiffness(ONES.byte(), STAGE), "pass floats"),
    "TNS on meta": (lambda: at.stiffness.total_neural_stiffness(META, STAGE), "meta device"),
    "TNS, drop_first is text": (lambda: at.stiffness.total_neural_stiffness(ONES, STAGE, "yes"), "drop_first = 'yes'"),
    "surface, thresholds on meta": (lambda: at.stiffness.stiffness_surface(ONES, STAGE, META[0], 0.1), "m1 is on meta"),
    "slope, a step that does not broadcast": (lambda: at.schemes.RK4.slope(rate, 0.0, ONES, torch.ones(2)), "does not broadcast"),
    "slope, a step that overflows": (lambda: at.schemes.RK4.slope(rate, 0.0, ONES, 1e300), "use a smaller step"),
    "NSI, a step that does not broadcast": (lambda: at.stiffness.neural_stiffness_index(ONES, ONES, torch.ones(5)), "does not broadcast"),
    "stiffness, the time is text": (lambda: at.stiffness.stiffness_index(rate, ONES, "now"), "t is a str"),
    "thresholds are text": (lambda: at.stiffness.stiffness_surface(ONES, STAGE, "a", 0.1), "m1 = 'a'"),
    "stages are None": (lambda: at.stiffness.total_neural_stiffness(ONES, None), "stage is None"),
    # systems and corrections
    "a correction of no such option": (lambda: at.corrections.CSM(3, width=4, body="lstm", colour=1), "no option colour"),
    "a correction of integers": (lambda: at.corrections.Linear(3, dtype=torch.int64), "not a floating dtype"),
    "a horizon of too many steps": (lambda: whole_steps(1e-300, 1.0), "shorten it"),
    "half a trajectory": (lambda: Plan(1.5, 0.1, 2, 1), "trajectories = 1.5"),
    "a trust region in half precision": (lambda: TrustRegion.around(ONES.half()), "float32 or float64"),
    "a system's rate of a list": (lambda: at.systems.Lorenz()(0.0, [1.0, 2.0, 3.0]), r"\[\*batch, 3\]"),
    "a system's rate of another size": (lambda: at.systems.Lorenz()(0.0, torch.ones(2, 4)), r"\[\*batch, 3\]"),
    "an energy of integers": (lambda: at.systems.HenonHeiles().energy(torch.ones(4, dtype=torch.int64)), "use .float"),
    "exact, times of two dimensions": (lambda: at.systems.Logistic().exact(ONES, torch.ones(1)), r"times \[n\]"),
    "sample, no device": (lambda: at.systems.Lorenz().sample(2, device="nowhere:3"), "cannot be used here"),
    "sample, no dtype": (lambda: at.systems.Robertson().sample(2, dtype="float"), "not a floating dtype"),
    "sample, no generator": (lambda: at.systems.Lorenz().sample(2, 7), "torch.Generator"),
    "sample, half a state": (lambda: at.systems.Lorenz().sample(1.5), "cannot sample 1.5"),
    "SpringMass(2.0)": (lambda: at.systems.SpringMass(2.0), "n = 2.0 must be"),
    "SpringMass, no seed": (lambda: at.systems.SpringMass(2, seed=[1]), r"seed = \[1\]"),
    "a correction of another size": (lambda: correction()(torch.ones(2, 4), torch.ones(2, 4), 0.1), r"\[\*batch, 3\]"),
    "a correction of another type": (lambda: correction(torch.float64)(ONES, ONES, 0.1), "and the correction has"),
    "a correction on another device": (lambda: correction()(META, META, 0.1), "u is on meta"),
    "a correction of half a width": (lambda: at.corrections.AttNS(3, width=2.5), "width = 2.5"),
    "a correction of less than nothing": (lambda: at.corrections.Linear(-1), "dim = -1"),
    "a period of 0": (lambda: at.corrections.NeurVec(3, width=4, period=0.0), "more than 0"),
    "a period, times that do not fit": (
        lambda: at.corrections.Linear(3, period=1.0)(ONES, ONES, 0.1, torch.ones(5)), "t has shape"
    ),
    "a trust region of nothing": (lambda: TrustRegion.around(torch.ones(0, 2)), "at least two"),
    "a trust region's distance of integers": (lambda: TrustRegion(3).distance(ONES.long()), "pass floats"),
    "a horizon of NaN": (lambda: whole_steps(0.1, math.nan), "horizon = nan"),
    "how steep is a Softplus?": (lambda: theory.steepest(nn.Softplus()), "Softplus"),
    "an observed constant of nothing": (
        lambda: theory.lipschitz_observed(correction(), ONES[:0], ONES[:0], 0.1), "not empty"
    ),
    "curvatures of what?": (lambda: theory.curvature_distribution(rate, torch.ones(2, 1, 1), ONES[0], "all"), "of 'all'"),
    "an event without a start": (lambda: event(t0=None), "t0 is a NoneType"),
    "an event with two starts": (lambda: event(t0=torch.zeros(2)), r"t0 has shape \[2\]"),
    "an event that is no function": (lambda: event("y"), "event_fn is a str"),
    "an event that returns nothing": (lambda: event(lambda t, y: None), "event_fn returned None"),
    "an event that is true or false": (lambda: event(lambda t, y: t > 1), "event_fn returned torch.bool"),
    "an event of no values": (lambda: event(lambda t, y: y[:0]), r"event_fn returned torch.float32 \[0\]"),
    "an event of NaN": (lambda: event(lambda t, y: y * math.nan), "not a number at the start"),
    "an event on another device": (lambda: event(lambda t, y: META), "event_fn returned is on the meta device"),
    "an event after too large a step": (
        lambda: event(method="rk4", options={"step_size": 1e300}), "need the option step_size > 0"
    ),
    "a method that is a list": (lambda: event(method=["rk4"]), "scheme is a list"),
    "an equation that is no function": (lambda: at.evolve("rate", ONES, torch.arange(3.0)), "f is a str"),
    "a tuned solver's time without an end": (lambda: tuned().solve(ONES[:, :2], math.inf), "not a finite time"),
    "a tuned solver of a list": (lambda: tuned().solve([[1.0, 0.0]], 1.0), "u0 is a list"),
    "a tuned solver of no dimension": (lambda: tuned().solve(torch.tensor(1.0), 1.0), "u0 has no dimension"),
    "a comparison from a list": (
        lambda: at.compare(solver(), horizon=0.2, u0=[[1.0, 0.0]], peers=False), "u0 is a list"
    ),
    # attention
    "attention of text": (lambda: attend(key="key"), "key is a str"),
    "attention of two devices": (lambda: attend(value=Q.to("meta")), "value is on meta"),
    "attention, mask on another device": (lambda: attend(attn_mask=torch.ones(4, 4, device="meta")), "attn_mask is on meta"),
    "attention, window is a number with a point": (lambda: attend(window=2.5), "window 2.5"),
    "attention, dt is text": (lambda: attend(dt="1"), "dt = 1"),
    "attention, complex documents": (lambda: attend(documents=torch.ones(1, 4) * 1j), "integer ids"),
    "a trace of text": (lambda: trace("q", Q, pde="wave"), "query is a str"),
    "a trace, mask of one dimension": (lambda: trace(Q, Q, pde="wave", key_padding=torch.ones(4).bool()), "key_padding"),
    "a trace of no equation": (lambda: trace(Q, Q, pde=LearnedPDE("wave")), "not an equation"),
    "errors of maps that differ": (
        lambda: hybrid_errors(ONES, torch.ones(2, 5), Line(), pde=at.pdes.Wave(), steps=1), "one shape"
    ),
    "coefficients of text": (lambda: at.attention.coefficients("model"), "model is a str"),
    "Performer, values of other tokens": (
        lambda: performer_attention(Q, Q, Q[..., :2, :], features=torch.ones(8, 4)), "number of tokens"
    ),
    "Performer, features are text": (lambda: performer_attention(Q, Q, Q, features="f"), "features is a str"),
    "Performer, no keys": (
        lambda: performer_attention(Q, Q[..., :0, :], Q[..., :0, :], features=torch.ones(8, 4)), "holds no tokens"
    ),
    "half a feature": (lambda: RandomFeatures(2.5, 4), "dim = 2.5"),
    "assert_causal of text": (lambda: at.assert_causal(nn.Identity(), "ids"), "inputs is a str"),
    "PDEAttention of two dimensions": (lambda: PDEAttention(8, 2)(torch.ones(4, 8)), r"\[batch, tokens, 8\]"),
    "PDEAttention of doubles": (lambda: PDEAttention(8, 2)(torch.ones(1, 4, 8).double()), "torch.float64"),
    "PDEAttention of -1 heads": (lambda: PDEAttention(-(2**40), -1), "must be a multiple"),
    "a language model of -1 tokens": (lambda: LanguageModel(-1), "vocabulary = -1"),
    "a language model, dropout 1e300": (lambda: LanguageModel(5, dropout=1e300), "dropout = 1e"),
    "ids beyond the vocabulary": (lambda: model()(torch.full((1, 2), 99)), "ids go from 99 to 99"),
    "ids below 0": (lambda: model()(torch.full((1, 2), -3)), "ids go from -3"),
    "ids are a list": (lambda: model()([[1, 2]]), "ids is a list"),
    "padding of another shape": (lambda: model()(torch.ones(1, 2).long(), torch.ones(1, 3).bool()), "key_padding"),
    "top_k of 0": (lambda: model().generate(torch.ones(1, 2).long(), 1, top_k=0), "top_k = 0"),
    "temperature NaN": (lambda: model().generate(torch.ones(1, 2).long(), 1, temperature=math.nan), "temperature = nan"),
    "a text of no tokens": (lambda: Classifier(5, 2, dim=8, layers=1)(torch.ones(1, 0).long()), "hold no token"),
    "a cache, reordered by halves": (lambda: PDECache("wave").reorder(torch.tensor([0.5])), "must be integers"),
    "a cache of no equation": (lambda: PDECache(at.pdes.Diffusion), "not an equation"),
    "a line beyond its tensor": (lambda: Line(5).laplacian(ONES), "counts from the end"),
    "a line of no positions": (lambda: Line().gradient(torch.ones(2, 0)), "no positions"),
    "steps of integers": (lambda: evolve(at.pdes.Diffusion(), ONES.long(), Line(), 1, 1.0), "pass floats"),
    "steps without a line": (lambda: evolve(at.pdes.Diffusion(), ONES, None, 1, 1.0), "pass a Line"),
    "a step that overflows": (lambda: evolve(at.pdes.Diffusion(), ONES, Line(), 1, 1e300), "take smaller steps"),
    "coefficients of other heads": (
        lambda: at.pdes.Diffusion(torch.ones(7, 1, 1)).step(torch.ones(2, 3, 4), None, Line(), 0.1), "heads, 1, 1"
    ),
    "an interval of no step": (lambda: at.pdes.Wave().interval("c", 0.0), "more than 0"),
    "a step of NaN": (lambda: at.pdes.Diffusion().check(math.nan), "dt = nan"),
    "alpha is text": (lambda: at.pdes.Diffusion("0.1"), "alpha = '0.1'"),
    "half a token": (lambda: for_length("wave", 2.5), "must be at least 1"),
    "attention, documents are bools": (lambda: attend(documents=torch.ones(1, 4).bool()), "integer ids"),
    "curvatures of nothing": (lambda: theory.curvature_distribution(rate, torch.ones(2, 0, 1), ONES[0]), "give"),
    "attention, coefficients of other heads": (lambda: attend(pde=at.pdes.Diffusion(torch.full((7, 1, 1), 0.1))), "2 heads"),
    "Performer, coefficients of other heads": (
        lambda: performer_attention(Q[:, :1], Q[:, :1], Q[:, :1], features=torch.ones(8, 4),
                                    pde=at.pdes.Wave(torch.full((7, 1, 1), 0.1))), "1 heads"
    ),
    "attention of no dimension": (lambda: attend(query=Q[..., :0], key=Q[..., :0]), "last dimension"),
    "attention, scale is a list": (lambda: attend(scale=[1.0]), "scale ="),
    "Performer, chunk is True": (lambda: performer_attention(Q, Q, Q, features=torch.ones(8, 4), chunk=True), "chunk = True"),
    "walls that do not fit": (lambda: Line(open=torch.ones(9).bool()).laplacian(ONES), "broadcast to the"),
    "a reaction that overflows": (lambda: at.pdes.ReactionDiffusion(split=True).start(ONES, 1e9), "more than 87 overflows"),
    "a step that is infinitely too long": (lambda: at.pdes.Diffusion(1e-300).check(math.inf), "dt = inf"),
    # networks and data
    "a gate of integers for parameters": (lambda: at.gates.SGE(4, dtype=torch.int64), "not a floating dtype"),
    "a kernel of half a pixel": (lambda: at.gates.ECA(4, kernel_size=1.5), "kernel_size=1.5"),
    "no profile beside": (lambda: a_profile().beside("profile"), "pass a StiffnessProfile"),
    "profiles in a list": (lambda: compare_profiles([a_profile()]), "a dictionary"),
    "probe, no device": (lambda: at.probe(nn.Identity(), [ONES], device="nowhere:1"), "cannot be used here"),
    "a backbone, half in training": (lambda: Backbone(ResNet(BasicBlock, [1], [4], 2), (0,)).train(0.5), "mode = 0.5"),
    "timm's layer of no gate": (lambda: timm.attn_layer("seee"), "did you mean 'se'"),
    "scipy's method of no solver": (lambda: scipys.hybrid(nn.Identity()), "pass a HybridSolver"),
    "an export of no solver": (lambda: onnx.export(nn.Identity(), "model.onnx"), "pass a HybridSolver"),
    "an export of half a step": (lambda: onnx.export(a_solver(), "model.onnx", steps=1.5), "steps = 1.5"),
    "a PDE for no model": (lambda: transformers_.add_pde("model"), "model of transformers"),
    "a gate of a list": (lambda: at.gates.SE(4)([1.0]), "f is a list"),
    "a gate of integers": (lambda: at.gates.IEBN(4)(torch.ones(2, 4, 3, 3).long()), "pass floats"),
    "a gate on another device": (lambda: at.gates.ECA(4)(torch.ones(2, 4, 3, 3, device="meta")), "f is on meta"),
    "a gate of no pixels": (lambda: at.gates.CBAM(4)(torch.ones(2, 4, 0, 3)), "takes \\[batch, 4"),
    "a ResNet of two dimensions": (lambda: ResNet(BasicBlock, [1], [4], 2)(ONES), r"\[batch, 3, height, width\]"),
    "a ResNet of bools": (lambda: ResNet(BasicBlock, [1], [4], 2)(torch.ones(1, 3, 4, 4).bool()), "pass floats"),
    "a ResNet of no stages": (lambda: ResNet(BasicBlock, [], [4], 2), r"depths = \[\]"),
    "a ResNet of -1 classes": (lambda: ResNet(BasicBlock, [1], [4], -1), "num_classes = -1"),
    "a ViT of no patches": (lambda: vit(8, patch=0), "patch = 0"),
    "ranks of two lengths": (lambda: kendall(torch.ones(3), torch.ones(2)), "pairs"),
    "a profile that does not fit": (lambda: StiffnessProfile(ONES, ONES, ONES[:1], STAGE, ("a", "b", "c")), "inputs, blocks"),
    "texts are one text": (lambda: text.Bytes().encode("text"), "a list of texts"),
    "a text is None": (lambda: text.Words.of([None]), "holds a NoneType"),
    "an id below 0": (lambda: text.Bytes().decode([-1]), "no id"),
    "an id beyond the words": (lambda: text.Words.of(["a"]).decode([9]), "no id"),
    "a stream without a tokenizer": (lambda: text.stream(["a"], None), "tokenizer is a NoneType"),
    "windows of half tokens": (lambda: text.windows(torch.arange(9), 2.5), "tokens = 2.5"),
    "texts called None": (lambda: text.lines(None, "train"), "no data set is called None"),
    "images by floats": (lambda: digits().take(torch.tensor([0.5])), "positions"),
    "images beyond the last": (lambda: digits().normalised(torch.tensor([99_999])), "positions"),
    # what looked at its arguments before it checked them
    "attention, the query is a list": (lambda: attend(query=[1.0]), "query is a list"),
    "Performer, the query is nothing": (lambda: performer_attention(None, Q, Q, features=torch.ones(8, 4)), "query is a NoneType"),
    "windows of text": (lambda: window_attention("q", Q, Q, pde="wave", window=2), "query is a str"),
    "a cache attends to a list": (lambda: PDECache("wave").attend([1.0], Q, Q), "query is a list"),
    "a solver of several steps": (lambda: a_solver(torch.ones(3)), r"dt = a tensor \[3\] must be a number"),
    "a solver of a text for a step": (lambda: a_solver("0.1"), "dt = '0.1' must be a number"),
    "a solver's step of no tensor": (lambda: a_solver().step([1.0, 1.0, 1.0]), "u is a list"),
    "a solver's step of integers": (lambda: a_solver().step(ONES.long()), "states must be floating or complex"),
    "a solver's step at a text": (lambda: a_solver().step(ONES, "now"), "t is a str"),
    "a solver up to NaN": (lambda: a_solver().solve(ONES, math.nan), "not a finite time"),
    "a solver without end": (lambda: a_solver().solve(ONES, math.inf), "not a finite time"),
    "a solver that nobody waits for": (lambda: a_solver().solve(ONES, 1e300), "more than 1e.09 steps"),
    "a solver beyond all numbers": (lambda: a_solver().solve(ONES, 10**400), "is too large"),
    "a solver up to several times": (lambda: a_solver().solve(ONES, ONES), "t_end = a tensor"),
    "a fit of NaN trajectories": (lambda: a_fit(trajectories=math.nan), "trajectories = nan"),
    "a fit of a seed that is none": (lambda: a_fit(seed=True), "seed = True"),
    "a fit of too long a seed": (lambda: a_fit(seed=2**70), "between -2"),
    "a fit of half an Adam step": (lambda: a_fit(recipe=Ridge(adam_steps=0.5)), "adam_steps = 0.5"),
    # sequences over several processes
    "parts that are no runs": (lambda: Parts(((0, 1),)), "its runs .start, stop."),
    "parts of text": (lambda: Parts(((("a", 1),),)), "its runs .start, stop."),
    "parts of half a token": (lambda: Parts.split(2.5, 1), "tokens = 2.5"),
    "parts of a process that is not there": (lambda: Parts.split(9, 3).positions(3), "process = 3 must be from 0 to 2"),
    "parts of a process outside the group": (lambda: Parts.split(9, 3).positions(-1), "process = -1"),
    "a part along no dimension": (lambda: Parts.split(2, 2).take(ONES, 0, dim=7), "dim = 7 is not a dimension"),
    "too few pieces": (lambda: Parts.split(6, 2).join([ONES]), "a tensor for each of 2"),
    "pieces of other tokens": (lambda: Parts.split(6, 2).join([ONES, ONES]), "must have 3 tokens"),
    "pieces of other sizes": (lambda: Parts.split(4, 2).join([ONES, torch.ones(2, 4)]), "may differ only in tokens"),
    "a ring, the query is a list": (lambda: context_parallel_attention([1.0], Q, Q, "wave"), "query is a list"),
    "a ring of two dimensions": (lambda: context_parallel_attention(Q, torch.ones(()), Q, "wave"), "all three must be"),
    "a ring, parts are text": (lambda: context_parallel_attention(Q, Q, Q, "wave", parts="x"), "parts is a str"),
    "a ring, scale is a list": (lambda: context_parallel_attention(Q, Q, Q, "wave", scale=[1.0]), "scale ="),
}  # fmt: skip


def a_profile():
    return StiffnessProfile(ONES, ONES, ONES, STAGE, ("a", "b", "c"))


def a_solver(dt=0.1):
    return at.HybridSolver(at.systems.Lorenz(), "rk4", correction(), dt)


def a_fit(**options):
    small = {"dt": 0.1, "horizon": 0.2, "fine_dt": 0.05, "trajectories": 4, "width": 4}
    return at.fit(at.systems.Logistic(), **{**small, **options})


def digits():
    return images.load("digits", "test")


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_a_reason(name):
    call, reason = CASES[name]
    with pytest.raises((ValueError, TypeError), match=reason):
        call()


def test_short_ids_are_ids():
    ids = torch.ones(1, 3, dtype=torch.int16)
    assert torch.equal(model()(ids).isfinite().all(), torch.tensor(True))


def test_no_thresholds_give_no_numbers():
    assert at.stiffness.stiffness_surface(ONES, STAGE, torch.ones(0), torch.ones(2)).shape == (0, 2)


def test_second_derivatives_of_expanded_states():
    u = torch.ones(1, 2).expand(3, 2)
    assert theory.second_derivative(rate, u).shape == (3, 2)


def test_a_mask_of_keys_alone():
    mask = torch.tensor([True, True, False, True])
    options = {"axis": "query", "attn_mask": mask}
    assert torch.equal(attend(**options), attend(**{**options, "attn_mask": mask[None]}))


@pytest.mark.parametrize("causal", [False, True])
def test_nobody_attends_and_nothing_is_attended_to(causal):
    options = {"is_causal": causal, "attn_mask": torch.ones(0, 4).bool()}
    assert attend(query=Q[:, :, :0], **options).shape == (1, 2, 0, 8)
    nothing = attend(key=Q[:, :, :0], value=Q[:, :, :0], is_causal=causal)
    assert torch.equal(nothing, torch.zeros_like(Q))
    layer = PDEAttention(8, 2, causal=causal)
    assert layer(torch.ones(2, 0, 8), torch.ones(2, 0).bool()).shape == (2, 0, 8)


def test_errors_of_maps_under_coefficients_with_heads():
    pde = at.pdes.Diffusion(torch.full((2, 1, 1), 0.1))
    to_start, to_truth = hybrid_errors(torch.eye(3), torch.ones(3, 3) / 3, Line(), pde=pde, steps=2)
    assert to_start.shape == to_truth.shape == (3, 2)


def test_a_wave_with_coefficients_elsewhere_moves_them():
    u = torch.ones(2, 3, 4, dtype=torch.float64)
    moved, velocity = at.pdes.Wave(torch.full((2, 1, 1), 0.1)).step(u, None, Line(), 0.5)
    assert moved.dtype == velocity.dtype == torch.float64


def test_nobody_attends_in_tiles_and_by_features():
    nobody = torch.ones(0, 2, 4, 8)
    tiled = at.pde_attention(nobody, nobody, nobody, pde="reaction_diffusion", method="tiled")
    assert tiled.shape == nobody.shape
    none = performer_attention(Q[:, :, :0], Q, Q, features=torch.ones(8, 4), is_causal=True)
    assert none.shape == (1, 2, 0, 8)


def test_windows_documents_and_rings_of_no_tokens():
    none = Q[:, :, :0]
    assert window_attention(none, none, none, pde="wave", window=2, global_tokens=1).shape == none.shape
    documents = torch.ones(1, 0, dtype=torch.long)
    assert attend(query=none, key=none, value=none, documents=documents).shape == none.shape
    headless = Q[:, :0]
    assert context_parallel_attention(headless, headless, headless, "wave").shape == headless.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_on_devices_that_know_no_autocast(device):
    there = Q.to(device)
    for method in ("dense", "stepped", "tiled"):
        assert attend(query=there, key=there, value=there, method=method).shape == Q.shape


def test_autocast_leaves_what_is_wrong_to_the_checks():
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="value is a list"):
            attend(value=[1.0])
        with pytest.raises(ValueError, match=r"torch.int64; they must be of one|torch.int64"):
            attend(value=Q.long())
        assert attend().dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"recipe": Paper(epochs=1)}, {"recipe": Ridge(adam_steps=2)}])
def test_a_fit_leaves_the_random_numbers_alone(options):
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a_fit(**options)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_time_may_be_a_tensor_of_one():
    solver = a_solver(torch.tensor(0.125))
    assert torch.equal(solver.solve(ONES, torch.tensor(0.5)).u, solver.solve(ONES, 0.5).u)


def test_a_step_at_a_time_that_is_a_tensor():
    solver = a_solver()
    assert torch.equal(solver.step(ONES, torch.tensor(0.5, dtype=torch.float64)), solver.step(ONES, 0.5))


def test_parts_from_a_file_are_lists():
    assert Parts([[[0, 2]], [[2, 5]]]) == Parts((((0, 2),), ((2, 5),)))


def test_fca_takes_doubles_as_others_do():
    f = torch.rand(2, 16, 4, 4, dtype=torch.float64)
    assert at.gates.FCA(16)(f).dtype == torch.float64


def test_between_the_largest_states_of_a_type_there_are_others():
    """An explosion in bfloat16 under error control: interpolated states overflowed."""
    t = torch.tensor([-1.0, -1.1, -1.2, -1.3])
    for seed in (11, 19, 21, 28):
        u0 = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
        found = at.evolve(lambda t, u: 1e3 * u, u0, t, "fehlberg2", rtol=9e-3, atol=1e-6, max_steps=99)
        assert torch.isfinite(found.u).all()


def test_ranks_of_bytes_and_bools():
    """Differences of bytes are never negative, and bools have none."""
    x, y = torch.tensor([3, 1, 2], dtype=torch.uint8), torch.tensor([True, False, False])
    assert kendall(x, x.flip(0)) == kendall(x.int(), x.flip(0).int())
    assert kendall(y, y) == 1


def test_a_trust_region_of_two_states_that_are_one():
    region = TrustRegion.around(torch.ones(2, 1))
    assert torch.isfinite(region.factor).all()


def test_inputs_that_are_single_numbers_have_one_stage():
    assert stage_numbers([(), (), (3,)]) == [0, 0, 1]


def test_numbers_of_numpy_are_numbers():
    assert at.pdes.Diffusion(np.float32(0.1)).max_dt() > 4
    assert torch.isfinite(attend(dt=np.float64(0.5))).all()


# The judge itself: what it must not let through


class Same:
    """In place of a draw: always the first of the choices."""

    def __call__(self, strategy):
        return 0


def judged(run, finite=None, random=False):
    maker = Maker(Same(), sane=True)
    maker.tensors.append(ONES)
    return judge(Target("it", lambda m: None, random=random), maker, Call(run, finite=finite), limit=2.0)


def raising(error):
    raise error


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "exception"),
        (lambda: raising(KeyError("alpha")), "exception"),
        (lambda: raising(ValueError("no")), "no message"),
        (lambda: math.sqrt(-1), "bare error"),
        (lambda: torch.tensor([math.nan]), "not finite"),
        (lambda: torch.rand(1), "global state"),
        (lambda: torch.set_default_dtype(torch.float64), "global state"),
        (lambda: ONES.mul_(1), "changed its input"),
    ],
)
def test_the_judge_finds(run, kind):
    with pytest.raises(Finding) as found:
        judged(run)
    assert found.value.kind == kind


@pytest.mark.slow
def test_the_judge_stops_what_hangs():
    def forever():
        while True:
            pass

    with pytest.raises(Finding, match="hang"):
        judged(forever)


def test_the_judge_lets_a_clear_refusal_through():
    assert judged(lambda: at.get_scheme("rk5")) == "ValueError"
    assert judged(lambda: torch.ones(2)) == "result"
