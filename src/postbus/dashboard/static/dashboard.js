"use strict";
// The little that a page cannot do by itself: the theme, the chart, and looking again when the server says so.
(() => {
  const root = document.documentElement;
  const remembered = localStorage.getItem("postbus-theme");
  if (remembered) root.dataset.theme = remembered;

  document.addEventListener("click", (click) => {
    const target = click.target instanceof Element ? click.target.closest("[data-do]") : null;
    if (!target) return;
    if (target.dataset.do === "theme") {
      const dark = root.dataset.theme
        ? root.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("postbus-theme", root.dataset.theme);
      draw(true);
    }
    if (target.dataset.do === "all") {
      for (const box of document.querySelectorAll("input[name=letter]")) box.checked = target.checked;
    }
  });

  let plot = null;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19).replace(/:00$/, "");
  const draw = (anew) => {
    const place = document.getElementById("chart");
    const given = document.getElementById("chart-data");
    if (!place || !given) return;
    const data = JSON.parse(given.textContent);
    const columns = [data.times, ...data.series.map((each) => each.values)];
    if (plot && !anew && plot.root.isConnected) {
      plot.setData(columns);
      return;
    }
    if (plot) plot.destroy();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    plot = new uPlot(
      {
        width: place.clientWidth,
        height: 230,
        cursor: { y: false },
        scales: { y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
        axes: [{ ...axis, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => `${tick}/s`) }],
        series: [
          { label: "UTC", value: (_, at) => (at === null ? "" : clock(at)) },
          ...data.series.map((each) => ({ label: each.name, stroke: colour(each.colour), width: 2, points: { show: false } })),
        ],
      },
      columns,
      place,
    );
  };
  addEventListener("resize", () => plot && plot.setSize({ width: document.getElementById("chart").clientWidth, height: 230 }));

  let stream = null;
  // Says whether what is shown is renewed: a page that stands still must not look like one on which nothing happens.
  const mark = (live) => { document.getElementById("not-live").hidden = live; };
  const listen = () => {
    const address = document.body.dataset.live;
    if (!address || stream || document.hidden) return;
    stream = new EventSource(address);
    stream.addEventListener("open", () => mark(true));
    stream.addEventListener("changed", () => htmx.trigger(document.body, "changed"));
    stream.addEventListener("error", (error) => {
      mark(false);
      // A connection that broke off is taken up again by the browser; one that was refused is closed for good.
      if (error.target.readyState === EventSource.CLOSED) { stop(); setTimeout(listen, 5000); }
    });
  };
  const stop = () => { if (stream) { stream.close(); stream = null; } };
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : listen()));
  addEventListener("pagehide", stop);
  document.addEventListener("htmx:responseError", () => mark(false));
  document.addEventListener("htmx:sendError", () => mark(false));
  document.addEventListener("DOMContentLoaded", () => { draw(false); listen(); });
  document.addEventListener("htmx:afterSettle", () => {
    draw(false);
    if (stream && stream.readyState === EventSource.OPEN) mark(true);
  });
  // What somebody has opened or closed stays so, whatever comes with the next look.
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) => name !== "open" || node.localName !== "details";
})();
