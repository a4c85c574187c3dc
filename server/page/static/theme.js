// Light, dark, or like the system.

const NAME = "routed-experts-theme";

/** What `use` gives; null where storage is switched off. */
function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

export function watchTheme(select, changed) {
  const apply = () => {
    document.documentElement.dataset.theme = select.value;
    changed();
  };
  select.value = stored((storage) => storage.getItem(NAME)) ?? "auto";
  apply();
  select.addEventListener("change", () => {
    stored((storage) => storage.setItem(NAME, select.value));
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
