// Light, dark, or like the system.

export function watchTheme(select, changed) {
  const apply = () => {
    document.documentElement.dataset.theme = select.value;
    changed();
  };
  apply();
  select.addEventListener("change", apply);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
