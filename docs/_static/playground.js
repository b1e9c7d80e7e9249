/* The playground of attractor's documentation: an attention map in pseudo-time, and a stiff equation.

   Plain JavaScript without a library or the network. The numbers are computed by the functions in the first
   half, which tests/test_playground.py compares with the library's; the second half draws them into the
   elements with the ids "playground-map" and "playground-ode". */
(function () {
  "use strict";

  /* ---- PDE attention: Algorithm 1 with walls, as attractor.attention.engines.dense has it ---- */

  const COEFFICIENTS = {
    diffusion: { alpha: 0.1 },
    wave: { c: 0.15 },
    reaction_diffusion: { alpha: 0.1, beta: 0.02 },
    advection_diffusion: { alpha: 0.1, beta: 0.03 },
  };

  function complete(options) {
    if (!(options.pde in COEFFICIENTS)) {
      throw new Error(`no PDE is called ${options.pde}; there are ${Object.keys(COEFFICIENTS).join(", ")}`);
    }
    return {
      dt: 1, steps: 4, walls: "mask", mask: "none", size: 4, ...COEFFICIENTS[options.pde], ...options,
    };
  }

  /* Whether query i may attend to key j of n; size is that of a window, or the number of padded keys. */
  function allowed({ mask, size }, i, j, n) {
    if (mask === "causal") return j <= i;
    if (mask === "window") return Math.abs(j - i) <= size;
    if (mask === "causal_window") return j <= i && j >= i - size;
    if (mask === "padding") return j < n - size;
    return true;
  }

  function softmax(scores, may) {
    const top = Math.max(...scores.filter((_, j) => may[j]));
    const weights = scores.map((score, j) => (may[j] ? Math.exp(score - top) : 0));
    const sum = weights.reduce((a, b) => a + b, 0);
    return weights.map((weight) => (sum > 0 ? weight / sum : 0));
  }

  /* The second and the first difference of a row: what leaves a key through an open face reaches its neighbour. */
  function differences(row, open, periodic) {
    const n = row.length, laplacian = new Array(n).fill(0), gradient = new Array(n).fill(0);
    for (let j = 0; j < (periodic ? n : n - 1); j++) {
      if (!open[j]) continue;
      const next = (j + 1) % n, flux = row[next] - row[j], mean = (row[next] + row[j]) / 2;
      laplacian[j] += flux;
      laplacian[next] -= flux;
      gradient[j] += mean;
      gradient[next] -= mean;
    }
    return { laplacian, gradient };
  }

  function step(row, velocity, open, { pde, alpha, beta, c, dt, walls }) {
    const { laplacian, gradient } = differences(row, open, walls === "periodic");
    if (pde === "wave") {
      const moved = velocity.map((v, j) => v + dt * c * c * laplacian[j]);
      return [row.map((a, j) => a + dt * moved[j]), moved];
    }
    const change = {
      diffusion: () => 0,
      reaction_diffusion: (a) => beta * a * (1 - a),
      advection_diffusion: (a, j) => beta * gradient[j],
    }[pde];
    return [row.map((a, j) => a + dt * (alpha * laplacian[j] + change(a, j))), velocity];
  }

  /* The maps before and after each step, steps + 1 of them; scores are [queries][keys]. */
  function trace(options) {
    const all = complete(options), maps = Array.from({ length: all.steps + 1 }, () => []);
    all.scores.forEach((scores, i) => {
      const n = scores.length, may = scores.map((_, j) => allowed(all, i, j, n));
      const open = scores.map((_, j) => all.walls !== "mask" || (may[j] && j + 1 < n && may[j + 1]));
      let row = softmax(scores, may), velocity = new Array(n).fill(0);
      maps[0].push(row);
      for (let k = 1; k <= all.steps; k++) {
        [row, velocity] = step(row, velocity, open, all);
        maps[k].push(row);
      }
    });
    return maps;
  }

  /* The map [queries][keys] after all steps. */
  function evolve(options) {
    const maps = trace(options);
    return maps[maps.length - 1];
  }

  /* The largest stable step on the key axis. */
  function maxDt(options) {
    const { pde, alpha, beta, c } = complete(options);
    const over = (a, b) => (b > 0 ? a / b : Infinity);
    if (pde === "wave") return over(1, Math.abs(c));
    if (pde === "reaction_diffusion") return over(1, 2 * alpha + Math.abs(beta));
    if (pde === "advection_diffusion") return Math.min(over(1, 2 * alpha), over(2 * alpha, beta * beta));
    return over(1, 2 * alpha);
  }

  /* Row sums, and the mean weight of a row on later keys and on keys that its mask forbids. */
  function measures(options, map) {
    const all = complete(options), n = map.length;
    const total = (keep) =>
      map.reduce((sum, row, i) => row.reduce((s, a, j) => s + (keep(i, j) ? Math.abs(a) : 0), sum), 0) / n;
    return {
      rowSums: map.map((row) => row.reduce((a, b) => a + b, 0)),
      future: total((i, j) => j > i),
      forbidden: total((i, j) => !allowed(all, i, j, map[0].length)),
    };
  }

  /* ---- A stiff equation: two modes that decay with rates 1 and stiffness, mixed in both components ---- */

  const SCHEMES = {
    euler: { grows: (z) => 1 + z, limit: 2 },
    heun: { grows: (z) => 1 + z + (z * z) / 2, limit: 2 },
    rk4: { grows: (z) => 1 + z + (z * z) / 2 + (z * z * z) / 6 + (z * z * z * z) / 24, limit: 2.785293563405282 },
  };
  const START = [1.5, 0.5]; // the slow mode 1, the quick one 0.5

  /* u' = A u, A = [[-(1 + s) / 2, (s - 1) / 2], [(s - 1) / 2, -(1 + s) / 2]]: a function of A, mode by mode. */
  function ofModes(slow, quick) {
    return [[(slow + quick) / 2, (slow - quick) / 2], [(slow - quick) / 2, (slow + quick) / 2]];
  }

  function product(matrix, u) {
    return matrix.map((row) => row[0] * u[0] + row[1] * u[1]);
  }

  /* M with u(t + dt) = (plain step) + M u: what the correction "linear" of the library is fitted to. */
  function correction({ stiffness, dt, scheme }) {
    const error = (rate) => Math.exp(-rate * dt) - SCHEMES[scheme].grows(-rate * dt);
    return ofModes(error(1), error(stiffness));
  }

  /* States [steps + 1][2] from START to the time end; corrected by the matrix, or plain. */
  function solve({ stiffness, dt, scheme, end = 2, matrix = null }) {
    const { grows } = SCHEMES[scheme], plain = ofModes(grows(-dt), grows(-stiffness * dt));
    const states = [START];
    for (let k = 0; k < Math.round(end / dt); k++) {
      const u = states[k], moved = product(plain, u);
      const added = matrix ? product(matrix, u) : [0, 0];
      states.push([moved[0] + added[0], moved[1] + added[1]]);
    }
    return states;
  }

  function exact(stiffness, t) {
    const slow = Math.exp(-t), quick = 0.5 * Math.exp(-stiffness * t);
    return [slow + quick, slow - quick];
  }

  /* The largest error of the states after each step. */
  function largestError(states, stiffness, dt) {
    return Math.max(...states.map((u, k) => {
      const truth = exact(stiffness, k * dt);
      const error = Math.max(Math.abs(u[0] - truth[0]), Math.abs(u[1] - truth[1]));
      return Number.isFinite(error) ? error : Infinity;
    }));
  }

  window.attractorPlayground = { evolve, trace, maxDt, measures, correction, solve, exact, largestError };

  /* ---- The page ---- */

  const TOKENS = 24;
  const CONTROLS = {
    map: [
      ["pde", "PDE", { diffusion: "diffusion", wave: "wave", reaction_diffusion: "reaction-diffusion",
                       advection_diffusion: "advection-diffusion" }],
      ["alpha", "alpha, how quickly it spreads", [0, 0.6, 0.01, 0.2]],
      ["beta", "beta, reaction or drift", [-0.4, 0.4, 0.01, 0.1]],
      ["c", "c, speed of the wave", [0, 1.2, 0.01, 0.4]],
      ["dt", "dt, a step", [0.1, 3, 0.05, 1]],
      ["steps", "steps", [0, 32, 1, 6]],
      ["mask", "mask", { causal: "causal", none: "none", window: "window", causal_window: "causal window",
                         padding: "padding" }],
      ["size", "window, or padded keys", [1, 12, 1, 4]],
      ["walls", "walls", { mask: "at the mask's edge", sequence: "at the ends only", periodic: "none: a ring" }],
      ["sharpness", "sharpness of the scores", [0.2, 4, 0.1, 2]],
      ["row", "row below", [0, TOKENS - 1, 1, 14]],
      ["seed", "scores number", [1, 20, 1, 3]],
    ],
    ode: [
      ["stiffness", "stiffness: rate of the quick mode", [2, 200, 1, 40]],
      ["step", "dt, a step", [0.005, 0.25, 0.005, 0.08]],
      ["scheme", "scheme", { rk4: "rk4", heun: "heun", euler: "euler" }],
      ["off", "true stiffness differs by, %", [-20, 20, 1, 0]],
    ],
  };

  const number = (x) => {
    if (!Number.isFinite(x)) return "∞";
    if (x === 0) return "0";
    return Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
  };

  function randomScores(seed, sharpness) {
    let state = seed * 2654435761 % 4294967296;
    const uniform = () => { // mulberry32
      state = (state + 0x6d2b79f5) | 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
    const vectors = () => Array.from({ length: TOKENS }, () => Array.from({ length: 4 }, normal));
    const queries = vectors(), keys = vectors();
    return queries.map((q) => keys.map((k) => sharpness * q.reduce((s, x, d) => s + x * k[d], 0) / 2));
  }

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function control(state, [name, label, kind], draw) {
    if (Array.isArray(kind)) {
      const [min, max, stepSize, value] = kind;
      const shown = element("output", { textContent: String(value) });
      const slider = element("input", { type: "range", id: `pg-${name}`, min, max, step: stepSize });
      slider.value = value;
      state[name] = value;
      slider.addEventListener("input", () => {
        state[name] = Number(slider.value);
        shown.textContent = slider.value;
        draw();
      });
      return element("label", { htmlFor: slider.id, className: "pg-control" },
        element("span", {}, label, shown), slider);
    }
    const choice = element("select", { id: `pg-${name}` },
      ...Object.entries(kind).map(([value, text]) => element("option", { value, textContent: text })));
    state[name] = choice.value;
    choice.addEventListener("change", () => {
      state[name] = choice.value;
      draw();
    });
    return element("label", { htmlFor: choice.id, className: "pg-control" }, element("span", {}, label), choice);
  }

  /* A canvas as sharp as the screen, its context, and its size in CSS pixels. */
  function prepared(canvas) {
    const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    return { pen, width, height };
  }

  function colours(root) {
    const css = getComputedStyle(root), get = (name) => css.getPropertyValue(name).trim();
    return { ink: get("--pg-ink"), dim: get("--pg-dim"), line: get("--pg-line"), paper: get("--pg-paper"),
             good: get("--pg-good"), bad: get("--pg-bad"), other: get("--pg-other") };
  }

  /* A map: weight in blue, weight that the mask forbids in red, negative weight in green, the mask's edge. */
  function drawMap(canvas, map, options, colour, row) {
    const { pen, width } = prepared(canvas), n = map.length, cell = width / n;
    const top = Math.max(0.15, ...map.flat().filter(Number.isFinite).map(Math.abs).filter((a) => a <= 1));
    const edge = (k) => Math.round(k * cell);
    const fill = (i, j) => pen.fillRect(edge(j), edge(i), edge(j + 1) - edge(j), edge(i + 1) - edge(i));
    map.forEach((weights, i) => weights.forEach((a, j) => {
      const may = allowed(options, i, j, n), size = Number.isFinite(a) ? Math.min(1, Math.abs(a) / top) : 1;
      pen.globalAlpha = 1;
      pen.fillStyle = may ? colour.paper : colour.line;
      fill(i, j);
      if (size === 0) return;
      pen.globalAlpha = Math.max(size > 1e-4 ? 0.12 : 0, Math.sqrt(size));
      pen.fillStyle = a < 0 ? colour.other : may ? colour.good : colour.bad;
      fill(i, j);
    }));
    pen.globalAlpha = 1;
    pen.strokeStyle = colour.ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        if (j + 1 < n && allowed(options, i, j, n) !== allowed(options, i, j + 1, n)) {
          pen.moveTo((j + 1) * cell, i * cell);
          pen.lineTo((j + 1) * cell, (i + 1) * cell);
        }
        if (i + 1 < n && allowed(options, i, j, n) !== allowed(options, i + 1, j, n)) {
          pen.moveTo(j * cell, (i + 1) * cell);
          pen.lineTo((j + 1) * cell, (i + 1) * cell);
        }
      }
    }
    pen.stroke();
    pen.strokeStyle = colour.other;
    pen.strokeRect(1, row * cell, width - 2, cell);
  }

  function drawSums(canvas, sums, colour) {
    const { pen, width, height } = prepared(canvas), cell = height / sums.length;
    const x = (sum) => (width - 6) * Math.min(2, Math.max(0, sum)) / 2;
    sums.forEach((sum, i) => {
      pen.fillStyle = Math.abs(sum - 1) < 1e-9 ? colour.good : colour.bad;
      pen.fillRect(0, i * cell + 1, Number.isFinite(sum) ? x(sum) : width, Math.max(1, cell - 2));
    });
    pen.strokeStyle = colour.ink;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x(1), 0);
    pen.lineTo(x(1), height);
    pen.stroke();
  }

  /* One row before (outlines) and after its steps (bars). */
  function drawRow(canvas, before, after, options, row, colour) {
    const { pen, width, height } = prepared(canvas), n = after.length, cell = width / n;
    const finite = after.filter(Number.isFinite), limit = 1.5;
    const top = Math.min(limit, Math.max(...before, ...finite, 0.1)) * 1.15;
    const bottom = Math.max(-limit, Math.min(0, ...finite)) * 1.15;
    const y = (a) => 14 + (height - 30) * (1 - (Math.min(top, Math.max(bottom, a)) - bottom) / (top - bottom));
    after.forEach((a, j) => {
      pen.fillStyle = a < 0 ? colour.other : allowed(options, row, j, n) ? colour.good : colour.bad;
      const [high, low] = [y(Math.max(0, a)), y(Math.min(0, a))];
      if (Number.isFinite(a)) pen.fillRect(j * cell + 2, high, cell - 4, low - high);
      pen.strokeStyle = colour.ink;
      pen.lineWidth = 1;
      pen.strokeRect(j * cell + 2, y(before[j]), cell - 4, y(0) - y(before[j]));
    });
    pen.lineWidth = 2;
    for (let j = 0; j + 1 < n; j++) {
      if (allowed(options, row, j, n) === allowed(options, row, j + 1, n)) continue;
      pen.strokeStyle = colour.ink;
      pen.setLineDash(options.walls === "mask" ? [] : [3, 4]);
      pen.beginPath();
      pen.moveTo((j + 1) * cell, 0);
      pen.lineTo((j + 1) * cell, height - 14);
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.fillStyle = colour.dim;
    pen.textAlign = "left";
    pen.fillText("key 0", 2, height - 3);
    pen.textAlign = "right";
    pen.fillText(`key ${n - 1}`, width - 2, height - 3);
  }

  /* Lines over two axes; a logarithmic axis gets powers of ten. */
  function drawLines(canvas, lines, x, y, colour, marks = []) {
    const { pen, width, height } = prepared(canvas), left = 46, bottom = 34, right = 10, head = 8;
    const place = (v, axis) => {
      const [a, b, at] = axis.log ? [axis.min, axis.max, v].map(Math.log10) : [axis.min, axis.max, v];
      return (at - a) / (b - a);
    };
    const px = (v) => left + (width - left - right) * place(v, x);
    const py = (v) => head + (height - bottom - head) * (1 - Math.min(1.05, Math.max(-0.05, place(v, y))));
    pen.lineWidth = 1;
    pen.fillStyle = colour.dim;
    pen.strokeStyle = colour.line;
    const grid = (ticks, vertical) => ticks.forEach(([v, text]) => {
      pen.beginPath();
      pen.moveTo(vertical ? px(v) : left, vertical ? head : py(v));
      pen.lineTo(vertical ? px(v) : width - right, vertical ? height - bottom : py(v));
      pen.stroke();
      pen.textAlign = vertical ? "center" : "right";
      pen.fillText(text, vertical ? px(v) : left - 5, vertical ? height - bottom + 14 : py(v) + 4);
    });
    grid(x.ticks, true);
    grid(y.ticks, false);
    pen.textAlign = "right";
    pen.fillText(x.label, width - right, height - 4);
    pen.save();
    pen.beginPath();
    pen.rect(left, head, width - left - right, height - bottom - head);
    pen.clip();
    for (const [v, stroke, dash] of marks) {
      pen.strokeStyle = stroke;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(px(v), head);
      pen.lineTo(px(v), height - bottom);
      pen.stroke();
    }
    pen.setLineDash([]);
    for (const { points, stroke, dots, thick = 2 } of lines) {
      pen.strokeStyle = pen.fillStyle = stroke;
      pen.lineWidth = thick;
      pen.beginPath();
      points.forEach(([a, b], k) => pen[k ? "lineTo" : "moveTo"](px(a), py(Number.isFinite(b) ? b : y.max * 10)));
      pen.stroke();
      if (dots) points.forEach(([a, b]) => {
        pen.beginPath();
        pen.arc(px(a), py(Number.isFinite(b) ? b : y.max * 10), 3, 0, 7);
        pen.fill();
      });
    }
    pen.restore();
  }

  function told(list, rows) {
    list.replaceChildren(...rows.map(([name, value, kind = ""]) =>
      element("div", {}, element("dt", { textContent: name }),
        element("dd", { textContent: value, className: kind }))));
  }

  function mapPart(root) {
    const state = {}, canvas = (id, label) => element("canvas", { id, role: "img", ariaLabel: label });
    const before = canvas("pg-before", "the map before its steps");
    const after = canvas("pg-after", "the map after its steps");
    const sums = canvas("pg-sums", "row sums"), profile = canvas("pg-profile", "one row before and after");
    const list = element("dl", { id: "pg-told", className: "pg-told" });
    const draw = () => {
      const options = { ...state, scores: randomScores(state.seed, state.sharpness) };
      const uses = COEFFICIENTS[state.pde], sized = ["window", "causal_window", "padding"].includes(state.mask);
      for (const name of ["alpha", "beta", "c"]) shown[name].hidden = !(name in uses);
      shown.size.hidden = !sized;
      const maps = trace(options), map = maps[maps.length - 1], colour = colours(root);
      const found = measures(options, map), limit = maxDt(options);
      drawMap(before, maps[0], options, colour, state.row);
      drawMap(after, map, options, colour, state.row);
      drawSums(sums, found.rowSums, colour);
      drawRow(profile, maps[0][state.row], map[state.row], options, state.row, colour);
      const least = Math.min(...found.rowSums), most = Math.max(...found.rowSums), stable = state.dt <= limit;
      const same = Math.abs(most - 1) < 1e-9 && Math.abs(least - 1) < 1e-9;
      told(list, [
        ["largest stable dt", number(limit)],
        ["this dt", stable ? `${state.dt}: stable` : `${state.dt}: unstable, the library refuses`,
         stable ? "pg-good" : "pg-bad"],
        ["row sums", same ? "1" : `${number(least)} to ${number(most)}`, same ? "pg-good" : "pg-bad"],
        ["weight on future keys", number(found.future), state.mask.startsWith("causal") && found.future ? "pg-bad" : ""],
        ["weight on masked keys", number(found.forbidden), found.forbidden ? "pg-bad" : "pg-good"],
      ]);
    };
    const shown = Object.fromEntries(CONTROLS.map.map((one) => [one[0], control(state, one, () => draw())]));
    for (const one of [before, after]) {
      one.addEventListener("click", (event) => {
        const slider = root.querySelector("#pg-row");
        slider.value = Math.floor(TOKENS * event.offsetY / one.clientHeight);
        slider.dispatchEvent(new Event("input"));
      });
    }
    const figure = (text, ...inside) => element("figure", {}, element("figcaption", { textContent: text }), ...inside);
    root.append(element("section", { className: "pg-part" },
      element("div", { className: "pg-controls" }, ...Object.values(shown)),
      element("div", { className: "pg-pictures" },
        element("div", { className: "pg-maps" },
          figure("A(0): queries down, keys across", before), figure("A after the steps", after),
          element("figure", { className: "pg-narrow" }, element("figcaption", { textContent: "row sums" }), sums)),
        figure("the marked row: outlines before, bars after, a line where its mask ends", profile),
        list,
        element("p", { className: "pg-legend" },
          element("span", { className: "pg-good", textContent: "■ weight" }),
          element("span", { className: "pg-bad", textContent: "■ weight on masked keys" }),
          element("span", { className: "pg-other", textContent: "■ negative weight" })))));
    return draw;
  }

  function odePart(root) {
    const state = {}, end = 2;
    const path = element("canvas", { id: "pg-path", className: "pg-wide", role: "img", ariaLabel: "solutions over time" });
    const errors = element("canvas", { id: "pg-errors", className: "pg-wide", role: "img", ariaLabel: "error over step size" });
    const list = element("dl", { id: "pg-told-ode", className: "pg-told" });
    const draw = () => {
      const { step: dt, scheme } = state, matrix = correction({ stiffness: state.stiffness, dt, scheme });
      const stiffness = state.stiffness * (1 + state.off / 100), limit = SCHEMES[scheme].limit / stiffness;
      const colour = colours(root), timed = (states, h) => states.map((u, k) => [k * h, u[0]]);
      const plain = solve({ stiffness, dt, scheme }), corrected = solve({ stiffness, dt, scheme, matrix });
      const truth = Array.from({ length: 401 }, (_, k) => [k * end / 400, exact(stiffness, k * end / 400)[0]]);
      const ticks = (values) => values.map((v) => [v, String(v)]);
      drawLines(path, [
        { points: truth, stroke: colour.dim, thick: 4 },
        { points: timed(plain, dt), stroke: colour.bad, dots: true },
        { points: timed(corrected, dt), stroke: colour.good, dots: true },
      ], { min: 0, max: end, ticks: ticks([0, 0.5, 1, 1.5, 2]), label: "time" },
        { min: -1, max: 2, ticks: ticks([-1, 0, 1, 2]) }, colour);
      const sizes = Array.from({ length: 60 }, (_, k) => 0.005 * 50 ** (k / 59)).concat(dt).sort((a, b) => a - b);
      const curve = (m) => sizes.map((h) => {
        const error = largestError(solve({ stiffness, dt: h, scheme, matrix: m }), stiffness, h);
        return [h, Math.max(1e-17, error)];
      });
      const power = (k) => [10 ** k, `1e${k}`];
      drawLines(errors, [{ points: curve(null), stroke: colour.bad }, { points: curve(matrix), stroke: colour.good }],
        { min: 0.005, max: 0.25, log: true, label: "dt", ticks: ticks([0.005, 0.01, 0.02, 0.05, 0.1, 0.2]) },
        { min: 1e-17, max: 1e3, log: true, ticks: [-16, -12, -8, -4, 0].map(power) }, colour,
        [[dt, colour.ink, [4, 3]], [limit, colour.bad, [2, 4]]]);
      const [a, b] = [plain, corrected].map((states) => largestError(states, stiffness, dt));
      told(list, [
        ["largest stable dt, plain", number(limit)],
        ["this dt", dt <= limit ? `${dt}: stable` : `${dt}: unstable`, dt <= limit ? "pg-good" : "pg-bad"],
        ["largest error, plain", number(a), a < 1 ? "" : "pg-bad"],
        ["largest error, corrected", number(b), b < 1e-9 ? "pg-good" : b < 1 ? "" : "pg-bad"],
      ]);
    };
    const shown = CONTROLS.ode.map((one) => control(state, one, () => draw()));
    const figure = (text, inside) => element("figure", {}, element("figcaption", { textContent: text }), inside);
    root.append(element("section", { className: "pg-part" },
      element("div", { className: "pg-controls" }, ...shown),
      element("div", { className: "pg-pictures" },
        figure("the first component: exact, plain and corrected steps", path),
        figure("largest error for every step size, of the correction made for the dashed one", errors),
        list,
        element("p", { className: "pg-legend" },
          element("span", { className: "pg-dim", textContent: "━ exact" }),
          element("span", { className: "pg-bad", textContent: "━ plain; dots: its limit" }),
          element("span", { className: "pg-good", textContent: "━ corrected" })))));
    return draw;
  }

  function start() {
    for (const [id, part] of [["playground-map", mapPart], ["playground-ode", odePart]]) {
      const root = document.getElementById(id);
      if (!root) continue;
      const draw = part(root);
      draw();
      window.addEventListener("resize", draw);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
      new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
