// Diagrams are drawn when they come near the screen of a reader who does something, so that mermaid (2.5 MB) is loaded only by those who reach one.
(() => {
  const here = new URL('.', document.currentScript.src);
  let loading;
  const load = () => loading ??= new Promise((ok, bad) => {
    const s = document.createElement('script');
    s.src = new URL('../site_libs/mermaid/mermaid.min.js', here);
    s.onload = () => ok(window.mermaid);
    s.onerror = bad;
    document.head.append(s);
  });
  const dark = () => document.documentElement.classList.contains('quarto-dark');
  let n = 0;
  const draw = async (el) => {
    const [mermaid] = await Promise.all([load(), document.fonts.ready]);     // text is measured: in the font it will have
    mermaid.initialize({ startOnLoad: false, theme: dark() ? 'dark' : 'neutral', fontFamily: getComputedStyle(document.body).fontFamily });
    const { svg } = await mermaid.render(`mv-diagram-${n++}`, el.dataset.source);
    el.innerHTML = svg;
    el.firstElementChild.style.minWidth = `${el.firstElementChild.viewBox.baseVal.width * .75}px`;      // no smaller letters: what is wider scrolls
    el.classList.add('drawn');
    reachable();
  };
  // Near the screen: that is known when fonts and images have their place. And a diagram may stand on the first screen of somebody who only looks in:
  // until the reader moves, types or scrolls, the text of the diagram has to do.
  const once = (kinds) => new Promise((ok) => { for (const kind of kinds) window.addEventListener(kind, ok, { once: true, passive: true }); });
  const ready = Promise.all([once(['load']).then(() => document.fonts.ready), once(['scroll', 'pointermove', 'pointerdown', 'keydown'])]);
  document.addEventListener('DOMContentLoaded', () => {
    const diagrams = [...document.querySelectorAll('pre.mermaid')];
    for (const el of diagrams) el.dataset.source = el.textContent;
    const seen = new IntersectionObserver((entries) => {
      for (const e of entries) if (e.isIntersecting) { seen.unobserve(e.target); draw(e.target); }
    }, { rootMargin: '200px' });
    ready.then(() => { for (const el of diagrams) seen.observe(el); });
    // the theme of a diagram is in its SVG: draw again when the reader changes the page's
    let was = dark();
    new MutationObserver(() => {
      if (dark() === was) return;
      was = dark();
      for (const el of diagrams) if (el.classList.contains('drawn')) draw(el);
    }).observe(document.documentElement, { attributes: true, attributeFilter: ['class'] });
  });
  // what scrolls sideways must be reachable by keyboard
  const reachable = () => document.querySelectorAll('main pre, main table, main .sd-table, main .math.display').forEach((el) => { if (el.scrollWidth > el.clientWidth) el.tabIndex = 0; });
  window.addEventListener('load', reachable);
  window.addEventListener('resize', reachable);
})();
