"""Defects that the harness found in our own code, each with the test that now holds it."""

from __future__ import annotations

_PEOPLE = "tests/fault/test_people_and_strangers.py::"
_PUSHED, _LIES = "tests/unit/store/sync/test_push_again.py::", "tests/unit/loader/test_hostile_web_servers.py::"
_DISKS, _TORTURE = "tests/fault/test_disks.py::", "tests/fault/test_torture.py::"

FOUND: list[tuple[str, str]] = [
    (
        "Power loss took a new store's folder with everything committed in it: no folder's name was ever synced",
        f"{_DISKS}test_the_names_of_a_new_store_and_of_its_folders_are_on_the_disk_before_anything_is_in_them",
    ),
    (
        "Power loss took a pending shard with its commits: LMDB syncs the file, nobody synced its name",
        f"{_DISKS}test_a_pending_shards_name_is_on_the_disk_before_its_first_commit",
    ),
    (
        "`store verify` ended in a bare OSError where an older generation's manifest could be read once, and then no more",
        f"{_DISKS}test_an_older_manifest_that_cannot_be_read_is_a_fault_that_verify_names",
    ),
    (
        "On a disk that turned read-only a lock was kept until the process ended, and releasing it was a traceback",
        f"{_DISKS}test_a_lock_is_given_back_on_a_disk_that_has_turned_read_only",
    ),
    (
        "Adopting, sealing and publishing on a failing disk could end in a bare OSError",
        f"{_DISKS}test_what_the_system_refuses_while_a_store_is_changed_is_an_error_of_ours",
    ),
    (
        '`ingest pack "" STORE` (a shell variable that is not set) packed the folder that one stood in',
        f"{_TORTURE}test_an_empty_source_is_refused_and_is_not_the_folder_one_stands_in",
    ),
    (
        "A caption file that was a link to a device was read until the memory was gone; one that was a pipe was waited for",
        f"{_PEOPLE}test_captions_that_are_a_device_or_a_pipe_are_rejects_and_nobody_waits",
    ),
    (
        "A `metadata.jsonl` that was a pipe was waited for without end",
        f"{_PEOPLE}test_a_table_that_is_a_pipe_is_refused_and_nobody_waits",
    ),
    (
        "An optimizer's state that was not a pickle of torch's, and JSON nested without end, were tracebacks of the trainer",
        "tests/unit/train/outputs/test_checkpoint.py::test_an_optimizer_that_is_something_else_is_refused_and_nothing_in_it_runs",
    ),
    (
        "A disk that failed under a run's own files (metrics, status, card) was a traceback, and could hide what came first",
        "tests/unit/train/test_trainer.py::test_a_file_of_the_run_that_cannot_be_written_is_named_and_the_run_goes_on_once_it_can",
    ),
    (
        "A shard's id that could not be read was a bare OSError, by plain reads and by the map",
        f"{_DISKS}test_a_shards_id_that_cannot_be_read_is_an_error_of_ours",
    ),
    (
        "An iterator left alive past its loader's end printed a traceback as the interpreter went",
        "tests/unit/loader/test_loader.py::test_what_is_said_of_an_iteration_that_was_ended_stays_when_its_iterator_goes",
    ),
    (
        "A path with a name of more than 255 bytes ended in a traceback",
        f"{_TORTURE}test_a_name_that_is_too_long_is_said_in_words",
    ),
    (
        "A rank that met the others while their launcher was being stopped heard neither Ctrl-C nor SIGTERM, for minutes",
        "tests/fault/test_ranks_that_end.py::test_a_rank_that_waits_for_one_that_never_comes_ends_when_told",
    ),
    (
        "`ingest pack` waited for ever where its last shard could not be committed or sealed, and so did all other ranks",
        "tests/unit/ingest/pipeline/test_row_writer.py::test_an_error_of_the_writing_thread_is_raised_at_any_moment_and_nobody_waits",
    ),
    (
        "An image dated after 2262 was packed into a shard that nothing could seal; a tar's time of `nan` was damage",
        "tests/unit/ingest/sources/test_dates.py::test_images_of_any_date_are_packed_and_are_unchanged_the_next_time",
    ),
    (
        "A slow link was taken for a store that stalls: more was in flight than it brought before the requests' time was over",
        "tests/fault/test_remote_stores.py::test_a_slow_line_is_not_a_store_that_stalls",
    ),
    (
        "The error of a store that does not answer came late, named another row, and came again once the store was back",
        "tests/fault/test_remote_stores.py::test_a_store_that_stalls_is_an_error_within_the_deadline_and_iterating_again_resumes",
    ),
    (
        "A cache on a disk that had been full for a moment held no more than then, until the process ended",
        "tests/fault/test_remote_stores.py::test_a_full_disk_under_the_cache_is_said_or_lived_with_and_no_byte_is_wrong",
    ),
    (
        "A shard's name that was used again at a URL kept the old bytes under the new digests",
        f"{_PUSHED}test_a_name_that_is_used_again_is_refused_and_both_stay_whole",
    ),
    (
        "A push that was killed between its commit and its note could not be pushed again once garbage had been collected",
        f"{_PUSHED}test_a_push_that_ends_around_its_commit_can_be_pushed_again_after_a_collection",
    ),
    (
        "Where a server's clock was two days behind, a collection at a URL removed what was superseded seconds ago",
        f"{_PUSHED}test_what_was_superseded_lately_stays_whatever_the_clocks",
    ),
    (
        "On a disk whose clock was another one than the machine's, a collection removed what was superseded seconds ago",
        "tests/unit/store/change/test_garbage_collect.py::test_ages_are_by_the_clock_that_dates_the_files",
    ),
    (
        "Threads that shared a writer lost rows, or crashed the process",
        "tests/unit/store/write/test_writer_threads.py::test_what_several_threads_add_is_all_stored",
    ),
    (
        "A child that was forked from a writer in use touched its files and its locks",
        "tests/unit/store/write/test_writer_threads.py::test_a_forked_child_of_a_writer_is_refused_and_changes_nothing",
    ),
    (
        "What an error advised of a sealed shard with a damaged sidecar would have lost the shard's rows",
        "tests/unit/store/write/test_adopt.py::test_a_sealed_shard_without_a_sound_sidecar_is_sealed_again_where_the_message_says",
    ),
    (
        "At `file://`, objects were written and removed through links below the store",
        "tests/unit/store/sync/test_file_links.py::test_nothing_is_written_or_removed_through_a_link",
    ),
    (
        "Copies of one store that had diverged got each other's bytes from one cache, or ended each other by SIGBUS",
        "tests/unit/loader/test_copies_in_one_cache.py::test_diverged_copies_are_read_at_once_through_one_cache",
    ),
    (
        "A large file in the place of a store's prompts was read whole before it was refused",
        f"{_LIES}test_a_large_file_that_is_not_of_prompts_is_not_read_whole",
    ),
    (
        "`store pull` from a server of endless generations looked at them for longer than its deadline",
        f"{_LIES}test_generations_that_take_longer_than_the_deadline_are_refused",
    ),
    (
        "Lies about many shards' sidecars were found one after the other, for several deadlines",
        f"{_LIES}test_damaged_sidecars_of_many_shards_are_found_together_not_one_after_the_other",
    ),
]
