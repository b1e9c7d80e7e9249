// An attention map after so many steps of a PDE, the edge of its mask, and one of its rows.
function attractorMaps(data) {
  const part = what => document.getElementById(`map-${what}`);
  const step = part("step"), pde = part("pde"), walls = part("walls"), row = part("row"), play = part("play");
  const n = data.tokens, blue = "61,133,198", red = "224,83,61", green = "47,158,110";
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let timer = null;

  const arm = () => walls.checked ? "walls" : "no walls";
  const map = () => data.maps[pde.value][arm()][+step.value];
  const shade = (value, query, key) => value < 0 ? green : key > query ? red : blue;

  function sheet(canvas, tall) { // a canvas as sharp as the screen
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth, pen = canvas.getContext("2d");
    canvas.width = wide * ratio; canvas.height = (tall || wide) * ratio;
    canvas.style.height = `${tall || wide}px`;
    pen.scale(ratio, ratio); pen.font = "12px system-ui, sans-serif";
    return [pen, wide, tall || wide];
  }

  function drawMap(entries, chosen) {
    const [pen, wide] = sheet(part("canvas")), room = 18, dots = devicePixelRatio || 1;
    const cell = Math.floor((wide - room - 2) / n * dots) / dots; // whole dots: no seams
    const x = key => room + key * cell, y = query => room + query * cell;
    for (let query = 0; query < n; query++) for (let key = 0; key < n; key++) {
      const value = entries[query * n + key] / data.scale;
      if (!value) continue;
      pen.fillStyle = `rgba(${shade(value, query, key)},${Math.min(1, Math.sqrt(Math.abs(value) / 0.5))})`;
      pen.fillRect(x(key), y(query), cell, cell);
    }
    pen.strokeStyle = css("--ink"); pen.lineWidth = 1.5; pen.beginPath(); pen.moveTo(x(1), y(0));
    for (let query = 0; query < n; query++) { pen.lineTo(x(query + 1), y(query)); pen.lineTo(x(query + 1), y(query + 1)); }
    pen.stroke();
    pen.strokeStyle = css("--line"); pen.lineWidth = 1; pen.strokeRect(x(0), y(0), n * cell, n * cell);
    pen.strokeStyle = "#d9932b"; pen.lineWidth = 2; pen.strokeRect(x(0), y(chosen), n * cell, cell);
    pen.fillStyle = css("--dim"); pen.fillText("keys", x(0), room - 5);
    pen.save(); pen.translate(room - 6, y(0)); pen.rotate(-Math.PI / 2); pen.textAlign = "right"; pen.fillText("queries", 0, 0); pen.restore();
  }

  function drawBars(entries, chosen) {
    const [pen, wide, tall] = sheet(part("bars"), 300), left = 38, top = 24, low = tall - 30;
    const values = entries.slice(chosen * n, (chosen + 1) * n).map(v => v / data.scale);
    const first = data.maps[pde.value][arm()].map(m => Math.max(...m.slice(chosen * n, (chosen + 1) * n)) / data.scale);
    const least = Math.min(0, ...data.maps[pde.value][arm()].map(m => Math.min(...m.slice(chosen * n, (chosen + 1) * n)) / data.scale));
    const most = Math.max(...first), wideBar = (wide - left - 4) / n;
    const x = key => left + key * wideBar, y = value => low - (low - top) * (value - least) / (most - least);
    pen.strokeStyle = css("--line"); pen.lineWidth = 1;
    pen.fillStyle = css("--dim"); pen.textAlign = "right";
    for (const value of [0, most / 2, most]) {
      pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(wide, y(value)); pen.stroke();
      pen.fillText(value.toFixed(2), left - 5, y(value) + 4);
    }
    values.forEach((value, key) => {
      pen.fillStyle = `rgb(${shade(value, chosen, key)})`;
      pen.fillRect(x(key) + 1, Math.min(y(0), y(value)), wideBar - 1.5, Math.abs(y(value) - y(0)));
    });
    pen.strokeStyle = css("--ink"); pen.lineWidth = 1.5; pen.beginPath();
    pen.moveTo(x(chosen + 1), top - 6); pen.lineTo(x(chosen + 1), low); pen.stroke();
    pen.fillStyle = css("--dim"); pen.textAlign = chosen > n / 2 ? "right" : "left";
    pen.fillText("the mask's edge", x(chosen + 1) + (chosen > n / 2 ? -5 : 5), top - 10);
    pen.textAlign = "left"; pen.fillText(`weights of query ${chosen + 1} on its ${n} keys`, left, tall - 10);
  }

  function draw() {
    const entries = map(), chosen = +row.value - 1, t = +step.value, numbers = data.numbers[pde.value][arm()];
    step.nextElementSibling.textContent = t;
    row.nextElementSibling.textContent = chosen + 1;
    const low = numbers.row_sum_low[t].toFixed(4), high = numbers.row_sum_high[t].toFixed(4);
    const own = entries.slice(chosen * n + chosen + 1, (chosen + 1) * n).reduce((a, v) => a + Math.abs(v), 0) / data.scale;
    const future = numbers.future[t];
    part("numbers").innerHTML = `<span>row sums ${low === high ? low : `${low} to ${high}`}</span>` +
      `<span class="${future ? "bad" : ""}">weight on future keys ${future ? future.toFixed(4) : 0}, ` +
      `query ${chosen + 1}: ${own ? own.toFixed(4) : 0}</span>`;
    drawMap(entries, chosen);
    drawBars(entries, chosen);
  }

  function pause() { clearInterval(timer); timer = null; play.textContent = "Play"; }
  play.addEventListener("click", () => {
    if (timer) return pause();
    play.textContent = "Pause";
    timer = setInterval(() => { step.value = (+step.value + 1) % (+step.max + 1); draw(); }, 350);
  });
  step.addEventListener("input", () => { pause(); draw(); });
  for (const control of [pde, walls, row]) control.addEventListener("input", draw);
  for (const what of ["resize", "load"]) addEventListener(what, draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
