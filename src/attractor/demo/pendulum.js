// A film of one or more masses on springs or rods, solved in several ways: play, a slider, a choice.
function attractorPendulum(name, data) {
  const part = what => document.getElementById(`${name}-${what}`);
  const canvas = part("canvas"), time = part("time"), play = part("play"), start = part("start");
  const shades = { exact: "--dim", RK4: "#e0533d", AttNS: "#3d85c6" };
  const sizes = { exact: 12, RK4: 7, AttNS: 7 };
  const tail = 3; // time units of a trace
  const css = colour => colour.startsWith("--")
    ? getComputedStyle(document.documentElement).getPropertyValue(colour).trim() : colour;
  const last = data.points.exact[0].length - 1;
  let now = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches, seen = false, before = null;

  // What all starts and ways need to be inside, with some room.
  const all = data.names.flatMap(way => data.points[way].flat());
  const xs = all.flatMap(p => p.filter((_, i) => i % 2 === 0)), ys = all.flatMap(p => p.filter((_, i) => i % 2));
  const range = (list, f) => list.reduce((a, b) => f(a, b), 0);
  const box = { left: range(xs, Math.min) - 0.4, right: range(xs, Math.max) + 0.4, low: range(ys, Math.min) - 0.4, high: 0.4 };

  const at = (way, frame) => { // points at a frame that need not be whole
    const film = data.points[way][+start.value], i = Math.min(Math.floor(frame), last), w = frame - i;
    const a = film[i], b = film[Math.min(i + 1, last)];
    return a.map((v, k) => v + w * (b[k] - v));
  };

  function draw() {
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth;
    const scale = Math.min(wide / (box.right - box.left), 380 / (box.high - box.low));
    const tall = Math.round(scale * (box.high - box.low));
    canvas.width = wide * ratio; canvas.height = tall * ratio; canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d"), middle = (wide - scale * (box.right - box.left)) / 2;
    pen.scale(ratio, ratio);
    const x = v => middle + scale * (v - box.left), y = v => scale * (box.high - v);
    for (const way of data.names) { // traces, fading
      const n = Math.round(tail / data.step), end = Math.floor(now);
      const film = data.points[way][+start.value], k = film[0].length - 2;
      pen.strokeStyle = css(shades[way]); pen.lineWidth = way === "exact" ? 4 : 1.6;
      for (let i = Math.max(1, end - n); i <= end; i++) {
        pen.globalAlpha = (way === "exact" ? 0.35 : 0.9) * (1 - (end - i) / n) ** 1.5;
        pen.beginPath(); pen.moveTo(x(film[i - 1][k]), y(film[i - 1][k + 1]));
        pen.lineTo(x(film[i][k]), y(film[i][k + 1])); pen.stroke();
      }
    }
    for (const way of data.names) {
      const points = at(way, now);
      pen.strokeStyle = pen.fillStyle = css(shades[way]);
      pen.globalAlpha = way === "exact" ? 0.45 : 0.95; pen.lineWidth = way === "exact" ? 3.5 : 1.5;
      let fromX = x(0), fromY = y(0);
      for (let k = 0; k < points.length; k += 2) {
        const toX = x(points[k]), toY = y(points[k + 1]);
        pen.beginPath(); pen.moveTo(fromX, fromY);
        if (data.springs) coil(pen, fromX, fromY, toX, toY);
        pen.lineTo(toX, toY); pen.stroke();
        pen.beginPath(); pen.arc(toX, toY, sizes[way], 0, 7); pen.fill();
        fromX = toX; fromY = toY;
      }
    }
    pen.globalAlpha = 1; pen.fillStyle = css("--ink");
    pen.beginPath(); pen.arc(x(0), y(0), 4, 0, 7); pen.fill();
    time.value = Math.round(now);
    time.nextElementSibling.textContent = (now * data.step).toFixed(1);
    const off = way => Number(data.off[way][+start.value][Math.round(now)].toPrecision(2));
    const dot = way => `<i style="background:${shades[way].startsWith("--") ? `var(${shades[way]})` : shades[way]}"></i>`;
    part("numbers").innerHTML = `<span>${dot("exact")}exact</span>` + ["RK4", "AttNS"].map(way =>
      `<span>${dot(way)}${way}${way === "RK4" ? "" : ", same step"}: ${off(way)} off</span>`).join("");
  }

  function coil(pen, ax, ay, bx, by) {
    const turns = 14, dx = bx - ax, dy = by - ay, length = Math.hypot(dx, dy) || 1;
    for (let i = 1; i < 2 * turns; i++) {
      const along = 0.1 + 0.8 * i / (2 * turns), side = (i % 2 ? 5 : -5) / length;
      pen.lineTo(ax + along * dx - side * dy, ay + along * dy + side * dx);
    }
  }

  function tick(moment) {
    if (!playing || !seen) { before = null; return; }
    if (before !== null) now = (now + (moment - before) / 1000 / data.step) % last;
    before = moment;
    draw();
    requestAnimationFrame(tick);
  }
  const go = () => { play.textContent = playing ? "Pause" : "Play"; if (playing && seen && before === null) requestAnimationFrame(tick); };
  play.addEventListener("click", () => { playing = !playing; go(); });
  time.addEventListener("input", () => { playing = false; now = +time.value; go(); draw(); });
  start.addEventListener("change", draw);
  new IntersectionObserver(found => { seen = found.some(f => f.isIntersecting); go(); }).observe(canvas);
  for (const what of ["resize", "load"]) addEventListener(what, draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  go();
  draw();
}
