// Make every .mv-lab live. At the first touch: load Pyodide from this site, unpack minivllm's pure modules, make the lab by name;
// from then on each event goes to Python's Lab.event, and the answer (view, sentence, controls) goes into the page.
(() => {
  const here = new URL('.', document.currentScript.src);
  const lib = (name) => new URL(`../site_libs/${name}`, here).href;
  let python;
  const boot = () => python ??= (async () => {
    const { loadPyodide } = await import(lib('pyodide/pyodide.mjs'));
    const [py, zip] = await Promise.all([loadPyodide({ indexURL: lib('pyodide/') }), fetch(lib('minivllm.zip')).then((r) => r.arrayBuffer())]);
    py.unpackArchive(zip, 'zip');
    return py.pyimport('minivllm.lab');
  })();

  const enliven = (el) => {
    const say = el.querySelector('.mv-say'), view = el.querySelector('.mv-view');
    const data = el.querySelector('script[type="application/json"]').textContent;
    let lab, pending = 0, queue = Promise.resolve();
    const make = async () => {
      if (lab) return lab;
      const old = say.textContent;
      say.textContent = 'Loading Python (6 MB, once) 正在加载…';
      const module = await boot();
      lab = module.open_lab(el.dataset.lab, data);
      if (say.textContent.startsWith('Loading')) say.textContent = old;
      el.dataset.live = 'yes';
      return lab;
    };
    const show = (state) => {
      const open = [...view.querySelectorAll('details')].map((d) => d.open);
      view.innerHTML = state.view;
      view.querySelectorAll('details').forEach((d, i) => { d.open = !!open[i]; });
      if (say.textContent !== state.say) say.textContent = state.say;
      for (const c of state.controls) {
        const box = el.querySelector(`[data-name="${c.name}"]`);
        const had = document.activeElement === box;
        if (c.kind === 'button') box.textContent = c.label;
        else if (pending) { /* the reader is ahead of us: what stands in the box is newer */ }
        else if (c.kind === 'slider') {
          box.value = c.options.indexOf(c.value);
          box.setAttribute('aria-valuetext', c.value);
          box.parentElement.querySelector('output').textContent = c.value;
        } else if (String(box.value) !== String(c.value)) box.value = c.value;
        box.disabled = !!c.disabled;
        if (had && box.disabled) el.querySelector('.mv-controls [data-name]:enabled')?.focus();   // a locked button must not lose the keyboard
      }
    };
    const send = (name, value = null) => (pending++, queue = queue.then(async () => {
      try {
        const answer = (await make()).event(name, JSON.stringify(value));
        pending--;
        show(JSON.parse(answer));
      }
      catch (e) { say.textContent = 'Python could not be loaded or failed: reload the page to try again.'; console.error(e); }
    }));
    const touch = () => { queue = queue.then(make).catch((e) => { say.textContent = 'Python could not be loaded: reload the page to try again.'; console.error(e); }); };
    el.addEventListener('pointerdown', touch, { once: true });
    el.addEventListener('focusin', touch, { once: true });

    for (const box of el.querySelectorAll('[data-name]')) {
      const name = box.dataset.name, options = box.dataset.options && JSON.parse(box.dataset.options);
      if (box.tagName === 'BUTTON') box.addEventListener('click', () => send(name));
      else if (box.tagName === 'SELECT') box.addEventListener('change', () => send(name, box.value));
      else if (options) {
        let timer;
        box.addEventListener('input', () => {
          box.parentElement.querySelector('output').textContent = options[box.value];
          clearTimeout(timer);
          timer = setTimeout(() => send(name, options[box.value]), 120);
        });
      } else if (box.type === 'range') box.addEventListener('input', () => send(name, +box.value));
      else box.addEventListener('input', () => send(name, box.value));
    }
    for (const play of el.querySelectorAll('.mv-play')) {
      const part = (what) => play.querySelector(`[data-do="${what}"]`), range = play.querySelector('[data-name]');
      let timer = null;
      const go = (to) => { range.value = to; return send(play.dataset.play, +range.value); };
      const stop = () => { clearTimeout(timer); timer = null; part('play').textContent = '▶ Play'; };
      const tick = async () => {
        await go(+range.value + 1);
        if (timer === null) return;
        if (+range.value >= +range.max) stop();
        else timer = setTimeout(tick, +part('speed').value);
      };
      part('play').addEventListener('click', () => {
        if (timer !== null) return stop();
        part('play').textContent = '⏸ Pause';
        if (+range.value >= +range.max) range.value = -1;
        timer = 0;
        tick();
      });
      part('step').addEventListener('click', () => { stop(); go(+range.value + 1); });
      part('back').addEventListener('click', () => { stop(); go(+range.value - 1); });
      range.addEventListener('input', stop);
    }
  };
  document.addEventListener('DOMContentLoaded', () => document.querySelectorAll('.mv-lab[data-lab]').forEach(enliven));
})();
