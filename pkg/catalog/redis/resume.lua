-- Ends a suspension: the catalog goes on as a new incarnation, with a digest of its own. A server that came back older since the repair, without
-- what it put back, is not taken into service (4).
-- One that is in service already stays so (5).
local P, coordinator, incarnation, back_seq, back_digest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local call = redis.call
local leader = call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
if call('EXISTS', P .. 'suspended') == 0 then return { 5, coordinator } end
local restoring = call('HGET', P .. 'suspended', 'x')
if restoring then return { 2, restoring } end
if back_seq > 0 then -- the last that was put back
  if tonumber(call('GET', P .. 'seq') or '0') < back_seq then return { 4, coordinator } end
  local id = string.format('%.0f', back_seq) .. '-0'
  local put_back = call('XRANGE', P .. 'log', id, id)[1]
  local fields = put_back and put_back[2] or {}
  for i = 1, #fields, 2 do
    if fields[i] == 'h' and fields[i + 1] ~= back_digest then return { 4, coordinator } end
  end
end
local seq = call('GET', P .. 'seq')
local lost = call('HGETALL', P .. 'lost')
call('HSET', P .. 'ancestors', call('GET', P .. 'incarnation') or '', seq)
for i = 1, #lost, 2 do
  local has = tonumber(call('HGET', P .. 'ancestors', lost[i]) or '0')
  if tonumber(lost[i + 1]) > has then call('HSET', P .. 'ancestors', lost[i], lost[i + 1]) end
end
call('DEL', P .. 'lost')
call('SET', P .. 'incarnation', incarnation)
local next = call('INCR', P .. 'seq')
local digest = redis.sha1hex((call('GET', P .. 'digest') or '') .. '\n' .. incarnation)
call('SET', P .. 'digest', digest)
call('XADD', P .. 'log', string.format('%.0f', next) .. '-0', 'e', coordinator, 'i', '', 'h', digest)
call('DEL', P .. 'suspended')
return { 1, coordinator }
