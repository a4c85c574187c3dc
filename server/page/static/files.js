// Files that are picked or dropped, also those in folders: [{name: with its folders, file}].

export const pickedFiles = (input) => inOrder(Array.from(input.files, (file) => ({ name: file.webkitRelativePath || file.name, file })));

/** Must be called in the event. */
export async function droppedFiles(transfer) {
  const entries = Array.from(transfer.items, (item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return inOrder((await Promise.all(entries.map(filesIn))).flat());
}

const inOrder = (files) => files.sort((one, other) => one.name.localeCompare(other.name));

async function filesIn(entry) {
  if (entry.isFile) return [{ name: entry.fullPath.slice(1), file: await new Promise((done, fail) => entry.file(done, fail)) }];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((done, fail) => reader.readEntries(done, fail)); // a hundred at a time
    if (!some.length) return found;
    found.push(...(await Promise.all(some.map(filesIn))).flat());
  }
}
