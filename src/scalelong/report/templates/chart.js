"use strict";
// Draws the charts of the page: series with bands that can be switched off, a crosshair for mouse, touch and keyboard,
// and a linear or logarithmic axis. All text is set as text, never as markup: names may be hostile.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["6 4", "", "", "", "", "2 4", "9 3 2 3", "4 2"];
  const MARKS = [
    (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    (r) => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    (r) => `M0 ${-1.25 * r}L${1.2 * r} ${r}H${-1.2 * r}z`,
    (r) => `M0 ${-1.35 * r}L${1.35 * r} 0L0 ${1.35 * r}L${-1.35 * r} 0z`,
  ];
  const MARK_ROOM = 20;

  // ---- small helpers
  const make = (name, attributes = {}, parent = null, text = null) => {
    const element = attributes.svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (key !== "svg") element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const draw = (name, attributes, parent, text = null) => make(name, { svg: true, ...attributes }, parent, text);
  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace(/^-/, "−");
  };
  // A value and its interval, all with the decimals that four digits of the value take.
  const estimate = (...values) => {
    const size = Math.max(Math.abs(values[0]), Math.max(...values.map(Math.abs)) / 30);
    const plain = size >= 1e-5 && size < 1e4;
    const decimals = Math.max(0, 3 - Math.floor(Math.log10(size)));
    const [value, low, high] = values.map((one) => (plain ? one.toFixed(decimals).replace("-", "−") : show(one)));
    return `${value} (${low} – ${high})`;
  };
  const brief = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
    if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
    return size !== 0 && size < 1e-3 ? value.toExponential().replace(/(\.\d{2})\d+/, "$1") : show(Number(value.toPrecision(6)));
  };
  // All labels of an axis with as many decimals as the finest of them.
  const labels = (ticks) => {
    const plain = ticks.every((tick) => tick === 0 || (Math.abs(tick) >= 1e-3 && Math.abs(tick) < 1e4));
    const decimals = Math.max(0, ...ticks.map((tick) => (String(Number(tick.toPrecision(6))).split(".")[1] || "").length));
    return plain && decimals <= 4 ? ticks.map((tick) => tick.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }).replace("-", "−")) : ticks.map(brief);
  };
  const remember = (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a private window has none */ } };
  const recall = (key) => { try { return sessionStorage.getItem(key); } catch { return null; } };

  // ---- axes
  const linearTicks = (low, high, count) => {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const off = (size) => Math.abs(Math.log(size / raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).reduce((best, size) => (off(size) < off(best) ? size : best));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (low, high, count) => {
    const decades = Math.log10(high / low);
    if (decades < 0.7) return linearTicks(low, high, count);
    const steps = decades > 4 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const step of steps) {
        const tick = step * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(Number(tick.toPrecision(6)));
      }
    }
    const every = Math.ceil(ticks.length / (count + 3));
    return ticks.filter((_, place) => place % every === 0);
  };
  const scale = (low, high, from, to, log) => {
    const f = log ? Math.log : (value) => value;
    const a = f(low), b = f(high);
    const span = b > a ? b - a : 1;
    return (value) => from + ((f(value) - a) / span) * (to - from);
  };

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.figure = document.getElementById(spec.key);
      this.view = Math.min(Number(recall(`${spec.key} view`)) || 0, spec.views.length - 1);
      this.log = recall(`${spec.key} log`) === null ? spec.logY : recall(`${spec.key} log`) === "true";
      this.off = new Set(JSON.parse(recall(`${spec.key} off`) || "[]"));
      this.runs = recall(`${spec.key} runs`) !== "false";
      this.late = recall(`${spec.key} late`) === "true";
      const xs = spec.views.flatMap((view) => view.series.flatMap((series) => this.lines(series).flatMap((line) => line.points.map((point) => point[0]))));
      this.middle = (xs.reduce((a, b) => Math.max(a, b), 0) + xs.reduce((a, b) => Math.min(a, b), Infinity)) / 2;
      this.build();
      this.redraw();
      new ResizeObserver(() => { if (this.canvas.clientWidth !== this.width) this.redraw(); }).observe(this.canvas);
    }

    get all() { return this.spec.views[this.view].series; }
    get shown() { return this.all.filter((series) => !this.off.has(series.name)).map((series) => (this.late ? this.secondHalf(series) : series)); }

    // Curves of a loss fall steeply at first, and what tells methods apart comes later.
    secondHalf(series) {
      const later = (rows) => rows.filter((row) => row[0] >= this.middle);
      const members = series.members.map((line) => ({ ...line, points: later(line.points) }));
      return { ...series, points: later(series.points), band: later(series.band), members, whole: series };
    }

    build() {
      const plot = this.figure.querySelector(".plot");
      this.controls = make("div", { class: "controls" }, this.figure.querySelector("figcaption"));
      this.buildControls();
      this.canvas = make("div", { class: "canvas" }, plot);
      this.svg = draw("svg", { role: "img", "aria-label": `${this.spec.title}: ${this.summary()}`, focusable: "false" }, this.canvas);
      this.scrub = make("input", { type: "range", class: "scrub", min: 0, step: 1, value: 0, "aria-label": `${this.spec.title}: move along ${this.spec.x}` }, this.canvas);
      this.tip = make("div", { class: "tip", hidden: "", "aria-hidden": "true" }, this.canvas);
      this.legend = make("ul", { class: "legend", "aria-label": "Shown series" }, plot);
      this.listen();
    }

    summary() {
      return this.all.map((series) => {
        const last = [...series.points].reverse().find((point) => point[1] !== null);
        return last ? `${series.name} ends at ${show(last[1])}` : series.name;
      }).join("; ");
    }

    buildControls() {
      const { spec } = this;
      if (spec.views.length > 1) {
        const label = make("label", {}, this.controls);
        make("span", { class: "hidden" }, label, "Setting");
        const select = make("select", {}, label);
        spec.views.forEach((view, place) => make("option", { value: place }, select, view.name || `view ${place + 1}`));
        select.value = this.view;
        select.addEventListener("change", () => { this.view = Number(select.value); remember(`${spec.key} view`, this.view); this.redraw(); });
      }
      if (spec.views.some((view) => view.series.some((series) => series.points.length && series.members.length))) {
        this.addSwitch("Single runs", this.runs, (on) => { this.runs = on; remember(`${spec.key} runs`, on); });
      }
      if (spec.x === "step") this.addSwitch("Second half", this.late, (on) => { this.late = on; remember(`${spec.key} late`, on); });
      if (this.positive()) this.addSwitch("Log scale", this.log, (on) => { this.log = on; remember(`${spec.key} log`, on); });
      else this.log = false;
    }

    positive() {
      const values = this.spec.views.flatMap((view) => view.series.flatMap((series) => this.values(series)));
      return values.length > 0 && values.every((value) => value > 0);
    }

    values(series) {
      const lines = [series.points, ...series.members.map((line) => line.points)];
      return lines.flat().map((point) => point[1]).filter((value) => value !== null);
    }

    addSwitch(name, on, change) {
      const button = make("button", { type: "button", class: "switch", "aria-pressed": on }, this.controls, name);
      button.addEventListener("click", () => {
        const now = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", now);
        change(now);
        this.redraw();
      });
    }

    listen() {
      const { svg, scrub } = this;
      const follow = (event) => {
        const box = svg.getBoundingClientRect();
        this.point(this.nearest(((event.clientX - box.left) / box.width) * this.width));
      };
      svg.addEventListener("pointermove", follow);
      svg.addEventListener("pointerdown", follow);
      svg.addEventListener("pointerleave", () => { if (document.activeElement !== scrub) this.point(null); });
      scrub.addEventListener("input", () => this.point(Number(scrub.value)));
      scrub.addEventListener("focus", () => { if (this.places.length) this.point(Number(scrub.value)); });
      scrub.addEventListener("blur", () => this.point(null));
      scrub.addEventListener("keydown", (event) => { if (event.key === "Escape") this.point(null); });
    }

    buildLegend() {
      const focused = this.legend.contains(document.activeElement) ? document.activeElement.dataset.name : null;
      this.legend.replaceChildren();
      const { area } = this.spec.views[this.view];
      // One series by itself needs neither a name nor a switch; its title has both.
      this.legend.hidden = this.all.length === 1 && !area && !this.all[0].ended;
      for (const series of this.all) {
        const item = make("li", {}, this.legend);
        const button = make("button", { type: "button", class: `s${series.style}`, "aria-pressed": !this.off.has(series.name) }, item);
        button.dataset.name = series.name;
        const key = draw("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, button);
        draw("path", { class: "curve", d: "M1 6H25", "stroke-dasharray": DASHES[series.style] }, key);
        draw("path", { class: "mark", d: this.mark(series)(4), transform: "translate(13 6)" }, key);
        make("span", {}, button, series.ended ? `${series.name} (${series.ended})` : series.name);
        button.addEventListener("click", () => this.toggle(series.name));
        if (focused === series.name) button.focus();
      }
      if (area) {
        const item = make("li", { class: "area" }, this.legend);
        const key = draw("svg", { viewBox: "0 0 26 12", width: 26, height: 12, "aria-hidden": "true" }, item);
        draw("rect", { class: "area-fill", width: 26, height: 12, rx: 2 }, key);
        make("span", {}, item, area.name);
      }
    }

    toggle(name) {
      if (this.off.has(name)) this.off.delete(name); else this.off.add(name);
      remember(`${this.spec.key} off`, JSON.stringify([...this.off]));
      this.redraw();
    }

    mark(series) { return MARKS[series.style % MARKS.length]; }

    // ---- drawing
    redraw() {
      this.width = Math.max(260, this.canvas.clientWidth || 640);
      this.height = Math.round(Math.max(250, Math.min(380, this.width * 0.46)));
      this.buildLegend();
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.tip.hidden = true;
      const range = this.range();
      this.places = range ? this.commonPlaces() : [];
      this.scrub.max = Math.max(0, this.places.length - 1);
      this.scrub.disabled = !this.places.length;
      if (!range) {
        draw("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, this.svg, this.off.size ? "Nothing is switched on." : "No values here.");
        return;
      }
      this.drawAxes(range);
      this.drawSeries();
      this.cursor = draw("g", {}, this.svg);
    }

    range() {
      const { area } = this.spec.views[this.view];
      const lines = this.shown.flatMap((series) => [series.points, ...(this.withRuns(series) ? series.members.map((line) => line.points) : [])]);
      const points = lines.flat().filter((point) => this.drawable(point));
      if (!points.length) return null;
      const bounds = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
      const ends = (rows) => rows.flatMap((row) => [row[1], row[2]]).filter((value) => !this.log || value > 0);
      const areas = area ? area.band : [];
      const xs = [...points, ...areas].map((row) => row[0]);
      const core = bounds([...points.map((point) => point[1]), ...ends(areas)]);
      const y = this.stretched(core, bounds(ends(this.shown.flatMap((series) => series.band))));
      return { x: this.padded(bounds(xs), this.spec.logX, 0), y: this.padded(y, this.log, 0.05) };
    }

    drawable(point) { return point[1] !== null && (!this.log || point[1] > 0) && (!this.spec.logX || point[0] > 0); }

    // Room for the bands, but not so much that the interval of two seeds would flatten all curves.
    stretched([low, high], [least, most]) {
      if (low === high) return [Math.min(low, least), Math.max(high, most)];
      const factor = (high / low) ** 0.6, room = 0.6 * (high - low);
      const [lowest, highest] = this.log ? [low / factor, high * factor] : [low - room, high + room];
      return [Math.max(Math.min(low, least), lowest), Math.min(Math.max(high, most), highest)];
    }

    padded([low, high], log, share) {
      if (low === high) return log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) || 1) * 0.2, high + (Math.abs(high) || 1) * 0.2];
      if (log) { const factor = (high / low) ** share; return [low / factor, high * factor]; }
      const room = (high - low) * share;
      return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
    }

    withRuns(series) { return !(series.whole || series).points.length || this.runs; }

    commonPlaces() {
      const xs = new Set();
      for (const series of this.shown) {
        for (const line of this.lines(series)) for (const point of line.points) if (this.drawable(point)) xs.add(point[0]);
      }
      return [...xs].sort((a, b) => a - b);
    }

    // What the crosshair reads: the mean, or the single runs where there is none.
    lines(series) {
      if ((series.whole || series).points.length) return [{ name: series.name, points: series.points, band: series.band, style: series.style }];
      return series.members.map((line) => ({ name: `${series.name}, ${line.name}`, points: line.points, band: [], style: series.style }));
    }

    drawAxes({ x, y }) {
      const yTicks = (this.log ? logTicks : linearTicks)(y[0], y[1], this.height / 52);
      const names = labels(yTicks);
      const wide = Math.max(...names.map((name) => name.length), 1);
      const box = { left: 12 + wide * 7.2, right: 14, top: 26, bottom: 44 };
      this.box = box;
      this.toX = scale(x[0], x[1], box.left + 6, this.width - box.right - 6, this.spec.logX);
      this.toY = scale(y[0], y[1], this.height - box.bottom, box.top, this.log);
      yTicks.forEach((tick, place) => {
        const at = this.toY(tick);
        draw("line", { class: "grid", x1: box.left, x2: this.width - box.right, y1: at, y2: at }, this.svg);
        draw("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, this.svg, names[place]);
      });
      const bottom = this.height - box.bottom;
      draw("line", { class: "base", x1: box.left, x2: this.width - box.right, y1: bottom, y2: bottom }, this.svg);
      for (const tick of this.xTicks(x)) {
        draw("text", { x: this.toX(tick), y: bottom + 18, "text-anchor": "middle" }, this.svg, brief(tick));
      }
      draw("text", { x: this.width - box.right, y: this.height - 6, "text-anchor": "end" }, this.svg, this.spec.x);
      draw("text", { x: 4, y: 13 }, this.svg, this.spec.y + (this.log ? " (log)" : ""));
    }

    xTicks(x) {
      const count = Math.max(2, Math.floor((this.width - this.box.left) / 85));
      const xs = this.commonPlaces();
      // A few places, such as skips or rates, are better named than rounded.
      if (xs.length <= count * 1.6) {
        const kept = [];
        for (const place of xs) if (!kept.length || this.toX(place) - this.toX(kept[kept.length - 1]) > 46) kept.push(place);
        return kept;
      }
      return (this.spec.logX ? logTicks : linearTicks)(x[0], x[1], count);
    }

    path(points) {
      let d = "", pen = false;
      for (const [x, y] of points) {
        if (!this.drawable([x, y])) { pen = false; continue; }
        d += `${pen ? "L" : "M"}${this.toX(x).toFixed(1)} ${this.toY(y).toFixed(1)}`;
        pen = true;
      }
      return d;
    }

    band(rows) {
      const floor = this.log ? (value) => Math.max(value, Number.MIN_VALUE) : (value) => value;
      const low = this.height - this.box.bottom, top = this.box.top;
      const at = (value) => Math.min(low, Math.max(top, this.toY(floor(value)))).toFixed(1);
      const there = rows.map((row) => `${this.toX(row[0]).toFixed(1)} ${at(row[2])}`);
      const back = [...rows].reverse().map((row) => `${this.toX(row[0]).toFixed(1)} ${at(row[1])}`);
      return there.length ? `M${[...there, ...back].join("L")}z` : "";
    }

    drawSeries() {
      const { area } = this.spec.views[this.view];
      if (area) draw("path", { class: "area-fill", d: this.band(area.band) }, this.svg);
      for (const series of this.shown) draw("path", { class: `band s${series.style}`, d: this.band(series.band) }, this.svg);
      for (const series of this.shown) {
        const group = draw("g", { class: `s${series.style}`, "data-series": series.name }, this.svg);
        if (this.withRuns(series)) for (const line of series.members) draw("path", { class: series.points.length ? "member" : "member alone", d: this.path(line.points) }, group);
        draw("path", { class: "curve", d: this.path(series.points), "stroke-dasharray": DASHES[series.style] }, group);
        this.drawMarks(series, group);
      }
    }

    drawMarks(series, group) {
      const mark = ([x, y]) => draw("path", { class: "mark", d: this.mark(series)(4), transform: `translate(${this.toX(x)} ${this.toY(y)})` }, group);
      const points = series.points.filter((point) => this.drawable(point));
      const wide = points.length ? this.toX(points[points.length - 1][0]) - this.toX(points[0][0]) : 0;
      if ((points.length - 1) * MARK_ROOM <= wide) points.forEach(mark);
      // A line of one point would not be seen.
      for (const line of this.lines(series)) {
        const known = line.points.filter((point) => this.drawable(point));
        if (known.length === 1) mark(known[0]);
      }
      if (!series.ended) return;
      for (const line of this.lines(series)) {
        const known = line.points.filter((point) => this.drawable(point));
        const last = known[known.length - 1];
        if (last && last[0] < this.furthest()) draw("path", { class: "cross", d: "M-5 -5L5 5M-5 5L5 -5", transform: `translate(${this.toX(last[0])} ${this.toY(last[1])})` }, group);
      }
    }

    furthest() { return this.places[this.places.length - 1]; }

    // ---- crosshair
    nearest(pixel) {
      let best = null;
      this.places.forEach((x, place) => {
        const away = Math.abs(this.toX(x) - pixel);
        if (best === null || away < best.away) best = { place, away };
      });
      return best && best.place;
    }

    point(place) {
      if (!this.cursor) return;
      this.cursor.replaceChildren();
      this.tip.hidden = place === null || !this.places.length;
      if (this.tip.hidden) return;
      const x = this.places[place], at = this.toX(x);
      this.scrub.value = place;
      draw("line", { class: "cursor", x1: at, x2: at, y1: this.box.top, y2: this.height - this.box.bottom }, this.cursor);
      const rows = this.shown.flatMap((series) => this.lines(series)).map((line) => this.reading(line, x)).filter((row) => row !== null);
      for (const row of rows) draw("circle", { class: `mark s${row.style}`, cx: at, cy: this.toY(row.y), r: 4.5 }, this.cursor);
      this.scrub.setAttribute("aria-valuetext", `${this.spec.x} ${show(x)}: ${rows.map((row) => `${row.name} ${row.text}`).join(", ")}`);
      this.fillTip(x, rows);
      this.placeTip(at);
    }

    reading(line, x) {
      const found = line.points.find((point) => point[0] === x);
      if (!found || !this.drawable(found)) return null;
      const range = line.band.find((row) => row[0] === x);
      return { name: line.name, style: line.style, y: found[1], text: range ? estimate(found[1], range[1], range[2]) : show(found[1]) };
    }

    fillTip(x, rows) {
      this.tip.replaceChildren();
      make("div", { class: "when" }, this.tip, `${this.spec.x} ${show(x)}`);
      const table = make("table", {}, this.tip);
      for (const row of rows.slice(0, 14)) {
        const line = make("tr", { class: `s${row.style}` }, table);
        const name = make("th", {}, line);
        make("span", { class: "swatch inline" }, name);
        make("span", {}, name, row.name);
        make("td", {}, line, row.text);
      }
    }

    placeTip(at) {
      const right = at > this.width / 2;
      const room = this.canvas.clientWidth / this.width;
      const left = right ? at * room - this.tip.offsetWidth - 12 : at * room + 12;
      this.tip.style.left = `${Math.max(0, Math.min(left, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
      this.tip.style.top = "28px";
    }
  }

  for (const spec of data.charts) new Chart(spec);

  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("code").textContent;
      try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Could not copy"; }
    });
  }

  // ---- a page that follows a run loads itself again, unless someone is reading a value or has paused it
  if (data.reload) {
    const pause = document.getElementById("pause");
    const set = (on) => { pause.setAttribute("aria-pressed", on); pause.textContent = on ? "Go on" : "Pause"; remember("paused", on); };
    set(recall("paused") === "true");
    pause.addEventListener("click", () => set(pause.getAttribute("aria-pressed") !== "true"));
    const busy = () => pause.getAttribute("aria-pressed") === "true" || document.querySelector(".tip:not([hidden])") || document.hidden;
    setInterval(() => { if (!busy()) location.reload(); }, data.reload * 1000);
  }
})();
