"""What passes between processes. Each message is made and read in one file.

    message        from             to               carried in
    -------------  ---------------  ---------------  ----------------------------------------------
    `OptIn`        API process      engine core      `SamplingParams.extra_args`
    `StepRows`     worker           engine core      `ModelRunnerOutput` (`transport`)
    `pack`         engine core      API process      the envelope's `routed_experts` (`envelope`)
    `Notes`        engine core      API process      the envelope's `kv_transfer_params`
    `RowsOutput`   engine core      API process      an output's ids, for rows that have no token
    `PrefillRows`  another engine   engine core      `kv_transfer_params` of a request

`Notes` has `UnknownRows` and `EngineStats`. In an engine core, `PlacedRows` are on the outputs of a
message and `SingleRows` beside them until `pack` has put them into the envelope; in the API process,
`Unpacker` takes them apart again. Rows have one of two forms (`rows`).
"""
